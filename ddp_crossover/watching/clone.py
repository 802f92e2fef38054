"""Small clones of an optimizer, to try its step on."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.torch_internals.optimizers import attributes_of, raw_step
from ddp_crossover.watching.caches import caches_among
from ddp_crossover.watching.noted_numbers import Comparisons
from ddp_crossover.watching.optimizer_snapshot import (
    OptimizerSnapshot,
    StandIn,
    ToUpdate,
    dotted_attributes,
    hyperparameters,
    reads_attributes,
    shared_state,
)

# Magnitudes on both sides of a threshold on gradients.
_MAGNITUDES = (1.0, 1e-4, 1e4)
_SAMPLES_PER_KIND = 3
_SAMPLE_EDGE = 3
_NOISE_NUMEL = 4099  # longer noise repeats itself


class Clone:
    """An optimizer of the same type and settings over a few tiny parameters.

    Args:
        optimizer: the optimizer.
        with_state: whether to begin with a state like that of the optimizer.
        shape_of: shape of a parameter, from its number of dimensions and its number among those of its kind.
        comparisons: notes how settings are compared; None for ordinary numbers.
        only: the only parameter to have a sample of; None for a few of each kind.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        with_state: bool,
        shape_of: Callable[[int, int], list[int]] = lambda dim, number: [_SAMPLE_EDGE + number] * dim,
        comparisons: Comparisons | None = None,
        only: Tensor | None = None,
    ) -> None:
        self.optimizer: Optimizer = object.__new__(type(optimizer))
        originals: dict[Tensor, Tensor] = {}
        groups = []
        for seed, group in enumerate(optimizer.param_groups):
            chosen = [p for p in group["params"] if only is None or p is only]
            samples = _samples(chosen, seed, shape_of, _scale(group))
            settings = _awake(hyperparameters(group))
            if comparisons is not None:
                settings = {name: comparisons.noted(name, value) for name, value in settings.items()}
            groups.append({**settings, "params": list(samples)})
            originals |= samples
        for name, value in attributes_of(optimizer).items():
            # An OrderedDict holds step or state_dict hooks, which the clone must not run.
            own = OrderedDict() if isinstance(value, OrderedDict) else _copy_of(value)
            if comparisons is not None:
                own = comparisons.noted(f".{name}", own)
            setattr(self.optimizer, name, own)
        self.optimizer.param_groups = groups
        self.optimizer.state = defaultdict(dict)
        for sample, original in originals.items() if reads_attributes(optimizer) else ():
            vars(sample).update((name, _state_of_sample(v, original, sample)) for name, v in vars(original).items())
        self.optimizer.state.update(shared_state(optimizer) if with_state else {})
        for sample, original in originals.items() if with_state else ():
            for key, value in optimizer.state.get(original, {}).items():
                self.optimizer.state[sample][key] = _state_of_sample(value, original, sample)
        self.parameters = list(originals)

    def set_gradients(self, step: int) -> list[Tensor]:
        """Give each parameter a gradient that depends on ``step`` only; returns copies of the gradients."""
        for index, parameter in enumerate(self.parameters):
            noise = _noise(parameter, seed=1000 * (step + 1) + index)
            parameter.grad = noise * _MAGNITUDES[step % len(_MAGNITUDES)]
        return [parameter.grad.clone() for parameter in self.parameters if parameter.grad is not None]

    def step_one_by_one(self) -> Any:
        """Step as ``deferred_updates`` does: once without parameters, then once for each parameter."""
        gradients = {parameter: parameter.grad for parameter in self.parameters}
        every = {name for each in [*self.optimizer.param_groups, dotted_attributes(self.optimizer)] for name in each}
        caches = caches_among(self.optimizer, every - {"params", ".defaults"})
        snapshot = OptimizerSnapshot(self.optimizer, caches=caches)
        stand_in = StandIn(self.optimizer, lambda _: False)
        stand_in.take([[] for _ in self.optimizer.param_groups])
        result = raw_step(stand_in.optimizer)(stand_in.optimizer)
        stand_in.give_back()
        snapshot.leave_alone()
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                memory = torch.nn.Parameter(parameter.detach())
                memory.grad = gradients[parameter]
                snapshot.step({index: [ToUpdate(parameter, memory)]})
        return result

    def everything(self) -> dict[str, Any]:
        """Everything that a step may have changed, by what it is."""
        optimizer = self.optimizer
        found: dict[str, Any] = {
            "parameters": self.parameters,
            "gradients": [parameter.grad for parameter in self.parameters],
            "state": [optimizer.state.get(parameter) for parameter in self.parameters],
        }
        for index, group in enumerate(optimizer.param_groups):
            found |= {f"{name!r} in param group {index}": value for name, value in hyperparameters(group).items()}
        for name, value in dotted_attributes(optimizer).items():
            found[f"attribute {name}"] = value
        for name, value in shared_state(optimizer).items():
            found[f"state under {name!r}"] = value
        return found


def _copy_of(value: Any) -> Any:
    return value if is_exhausted(value) else copy.deepcopy(value)


def is_exhausted(value: Any) -> bool:
    """Whether it is a generator that has ended, as ``model.named_parameters()`` once an optimizer was made of it."""
    return isinstance(value, GeneratorType) and value.gi_frame is None


def _samples(
    parameters: list[Tensor], seed: int, shape_of: Callable[[int, int], list[int]], scale: float
) -> dict[Tensor, Tensor]:
    """A few tiny parameters per number of dimensions, dtype and device, each with the one that it stands for."""
    kinds: dict[tuple[Any, ...], int] = {}
    samples: dict[Tensor, Tensor] = {}
    for parameter in parameters:
        kind = (parameter.dim(), parameter.dtype, parameter.device)
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] > _SAMPLES_PER_KIND:
            continue
        # The last two have one shape, because some optimizers stack those that have.
        number = min(kinds[kind], _SAMPLES_PER_KIND - 1)
        sample = torch.empty(shape_of(parameter.dim(), number), dtype=parameter.dtype, device=parameter.device)
        with torch.no_grad():
            sample.copy_(_noise(sample, seed=100 * seed + len(samples)) * scale)
        samples[sample.requires_grad_()] = parameter
    return samples


def _state_of_sample(value: Any, original: Tensor, sample: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.dim() and value.shape == original.shape:
        # Also for a parameter without elements: fused kernels of torch do not check that state is large enough.
        first = value.flatten()[0].item() if value.numel() else 0.0
        return torch.full_like(sample, first, dtype=value.dtype, requires_grad=False)
    return value.clone()


def _noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(min(like.numel(), _NOISE_NUMEL), generator=generator, device="cpu")
    return noise.repeat(-(-like.numel() // max(len(noise), 1)))[: like.numel()].view(like.shape).to(like)


def _scale(group: dict[str, Any]) -> float:
    """How large samples are: with a tiny learning rate, as in a warm-up, no update would be left of larger ones."""
    lr = group.get("lr")
    return min(1.0, 1e3 * abs(float(lr))) if lr is not None and float(lr) else 1.0


def _awake(group: dict[str, Any]) -> dict[str, Any]:
    """Replace a learning rate of 0, as at the start of a warm-up: with it every optimizer would pass."""
    lr = group.get("lr")
    return {**group, "lr": 1e-3} if lr is not None and not float(lr) else group
