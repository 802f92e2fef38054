"""Tests on a small clone whether an optimizer's step can be split over its parameters, and remembers the answers.

Updates may be deferred per fusion group only if stepping some parameters now and others later gives the same bits as
stepping all at once, and if a step without gradients changes nothing. Elementwise and per-parameter optimizers pass;
optimizers that couple parameters (by a global norm, or a shared counter in ``param_groups``) do not.

An answer depends on the optimizer's class, the settings of its param groups, and the kinds of its parameters. A process
that attaches many models, or one model again, asks the same questions each time; a trial takes some 20 ms. An optimizer
whose settings change is tested again.
"""

from __future__ import annotations

import copy
import enum
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.optim.optimizer_snapshot import (
    OptimizerSnapshot,
    StandIn,
    ToUpdate,
    hyperparameters,
    is_of_torch,
    optimizer_parameters,
    reads_attributes,
    same,
)
from ddp_crossover.optim.outside_settings import changeable_setting
from ddp_crossover.torch_internals.optimizers import has_hooks, has_raw_step, raw_step

_MOST_ANSWERS = 256
_answers: dict[Hashable, str | None] = {}

Question = Callable[[Optimizer, bool], str | None]
"""A trial on an optimizer, with the state that it has if the second argument says so; returns a reason or None."""


def ask(question: Question, optimizer: Optimizer, failed: Callable[[Exception], str | None]) -> str | None:
    """Return the answer to ``question``, or ``failed`` of the error that the trial raised without state and with it.

    Leaves the global random states of torch, NumPy and Python as they were.
    """
    kind = (question, *_kind(optimizer)) if is_of_torch(optimizer) else None
    if kind in _answers:
        return _answers[kind]
    # Empty state first. Some optimizers (Adagrad up to torch 2.11) create state in `__init__`, and fail without it.
    try:
        with _random_states_kept(optimizer):
            answer = question(optimizer, False)
    except Exception:
        try:
            with _random_states_kept(optimizer):
                return question(optimizer, True)
        except Exception as error:
            return failed(error)
    if kind is not None:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        _answers[kind] = answer
    return answer


def _kind(optimizer: Optimizer) -> tuple[Any, ...]:
    groups = []
    for group in optimizer.param_groups:
        settings = hyperparameters(group)
        settings.pop("lr", None)  # schedulers move it, and no formula changes with it
        kinds = sorted({(p.dim(), str(p.dtype), str(p.device)) for p in group["params"]})
        groups.append((repr(sorted(settings.items())), tuple(kinds)))
    return (type(optimizer), raw_step(optimizer), tuple(groups))


@contextmanager
def _random_states_kept(optimizer: Optimizer) -> Iterator[None]:
    devices = {p.device for p in optimizer_parameters(optimizer) if p.device.type == "cuda"}
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


# Enough steps for counters that act every few steps, and magnitudes on both sides of a threshold on gradients.
_STEPS = 12
_MAGNITUDES = (1.0, 1e-4, 1e4)
_SAMPLES_PER_KIND = 2
_SAMPLE_EDGE = 3


def why_not_separable(optimizer: Optimizer) -> str | None:
    """Why this optimizer's updates must not be deferred; None if they may be.

    Steps a clone with a few tiny parameters. Does not change the optimizer, its parameters, or the global random states
    of torch, NumPy and Python.
    """
    name = _unknown_attribute(optimizer)
    if name is not None and isinstance(inner := getattr(optimizer, name), Optimizer):
        return f"it wraps another optimizer. Attach that one, its .{name} ({type(inner).__name__}), instead"
    if not has_hooks(optimizer):
        return "its class does not call Optimizer.__init__(), so its step() takes no hooks"
    if not has_raw_step(optimizer):
        return (
            "its step() is not the plain method of a torch.optim.Optimizer class: something has replaced or wrapped it"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "a param group has differentiable=True"
    if name is not None:
        return f"its attribute .{name} may hold parameters or another optimizer"
    if _knows_parameters_by_id(optimizer):
        return (
            "it stores the id() of parameters, and deferred updates run on other tensor objects. Keep what belongs to "
            "a parameter in optimizer.state"
        )
    if (reason := _why_settings_may_change(optimizer)) is not None:
        return reason
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", "param_names") and isinstance(value, list) and len(value) == len(group["params"]):
                return f"the list {key!r} in a param group may have an entry for each parameter"
    return ask(
        _differs_one_by_one,
        optimizer,
        lambda error: f"a trial step on a small clone of it failed ({type(error).__name__}: {error})",
    )


def _differs_one_by_one(optimizer: Optimizer, with_state: bool) -> str | None:
    whole, split = Clone(optimizer, with_state), Clone(optimizer, with_state)
    for step in range(_STEPS):
        gradients = whole.set_gradients(step)
        attributes = copy.deepcopy([vars(parameter) for parameter in whole.parameters])
        result = raw_step(whole.optimizer)(whole.optimizer)
        if not same([vars(parameter) for parameter in whole.parameters], attributes):
            return "its step() sets attributes of the parameters, which may be read before a deferred update sets them"
        if not same([parameter.grad for parameter in whole.parameters], gradients):
            return "its step() changes gradients, which may be read before a deferred update changes them"
        split.set_gradients(step)
        returned = split.step_one_by_one()
        if split.closure_calls != step + 1:
            return "its step() does not call the closure exactly once"
        if not same(returned, result):
            return "its step() returns something that depends on the parameters"
    if not same(whole.everything(), split.everything()):
        return (
            "it does not update each parameter independently (updating them all at once and one by one in "
            "a trial on a small clone gave different results)"
        )
    return None


class Clone:
    """An optimizer of the same type and settings over a few tiny parameters.

    Args:
        optimizer: the optimizer.
        with_state: whether to begin with a state like that of the optimizer.
        shape_of: shape of a parameter, from its number of dimensions and its number among those of its kind.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        with_state: bool,
        shape_of: Callable[[int, int], list[int]] = lambda dim, number: [_SAMPLE_EDGE + number] * dim,
    ) -> None:
        self.optimizer: Optimizer = object.__new__(type(optimizer))
        self.closure_calls = 0
        originals: dict[Tensor, Tensor] = {}
        groups = []
        for seed, group in enumerate(optimizer.param_groups):
            samples = _samples(group["params"], seed, shape_of)
            groups.append({**_awake(hyperparameters(group)), "params": list(samples)})
            originals |= samples
        for name, value in vars(optimizer).items():
            if name not in ("step", "param_groups", "state"):
                # An OrderedDict holds step or state_dict hooks, which the clone must not run.
                own = OrderedDict() if isinstance(value, OrderedDict) else copy.deepcopy(value)
                setattr(self.optimizer, name, own)
        self.optimizer.param_groups = groups
        self.optimizer.state = defaultdict(dict)
        for sample, original in originals.items() if reads_attributes(optimizer) else ():
            vars(sample).update((name, _state_of_sample(v, original, sample)) for name, v in vars(original).items())
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
        snapshots: list[OptimizerSnapshot] = []
        stand_in = StandIn(self.optimizer, lambda _: False)

        def closure() -> None:
            self.closure_calls += 1
            snapshots.append(OptimizerSnapshot(self.optimizer))
            stand_in.take([[] for _ in self.optimizer.param_groups])

        result = raw_step(stand_in.optimizer)(stand_in.optimizer, closure=closure)
        stand_in.give_back()
        if not snapshots:  # the step has not called the closure
            return result
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                memory = torch.nn.Parameter(parameter.detach())
                memory.grad = gradients[parameter]
                snapshots[-1].step({index: [ToUpdate(parameter, memory)]})
        return result

    def everything(self) -> list[Any]:
        """Everything that a step may have changed."""
        optimizer = self.optimizer
        return [
            self.parameters,
            [optimizer.state.get(parameter) for parameter in self.parameters],
            [hyperparameters(group) for group in optimizer.param_groups],
            {
                name: value
                for name, value in vars(optimizer).items()
                if name not in ("param_groups", "state") and (isinstance(value, Tensor) or _is_plain(value))
            },
        ]


def _samples(parameters: list[Tensor], seed: int, shape_of: Callable[[int, int], list[int]]) -> dict[Tensor, Tensor]:
    """A few tiny parameters per number of dimensions, dtype and device, each with the one that it stands for."""
    kinds: dict[tuple[Any, ...], int] = {}
    samples: dict[Tensor, Tensor] = {}
    for parameter in parameters:
        kind = (parameter.dim(), parameter.dtype, parameter.device)
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] > _SAMPLES_PER_KIND:
            continue
        sample = torch.empty(shape_of(parameter.dim(), kinds[kind]), dtype=parameter.dtype, device=parameter.device)
        with torch.no_grad():
            sample.copy_(_noise(sample, seed=100 * seed + len(samples)))
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
    return torch.randn(like.shape, generator=generator).to(like)


def _unknown_attribute(optimizer: Optimizer) -> str | None:
    """Name of an attribute that may hold parameters, an optimizer, or anything that a clone would share; or None."""
    usual = vars(torch.optim.SGD([torch.zeros(1)])).keys() | {"step"}
    for name, value in vars(optimizer).items():
        if name not in usual and not _is_plain(value):
            return name
    return None


def _why_settings_may_change(optimizer: Optimizer) -> str | None:
    """Describe a setting that a snapshot cannot copy, so that a deferred update would read its later value; or None."""
    for group in optimizer.param_groups:
        for key, value in hyperparameters(group).items():
            if not _is_plain(value, Tensor):
                return (
                    f"its param groups hold a {type(value).__name__} in {key!r}, which cannot be copied for a deferred "
                    "update. Use numbers, strings or tensors"
                )
        for parameter in group["params"] if reads_attributes(optimizer) else ():
            for name, value in vars(parameter).items():
                if not _is_plain(value, Tensor):
                    return (
                        f"a parameter has a {type(value).__name__} in .{name}, which cannot be copied for a deferred "
                        "update. Use numbers, strings or tensors"
                    )
    what = changeable_setting(optimizer)
    if what is None:
        return None
    return f"its step() reads {what}, which may change before a deferred update runs. Pass it in a param group"


def _knows_parameters_by_id(optimizer: Optimizer) -> bool:
    """Whether it stores ids of parameters; deferred updates use other tensors of that memory, with other ids."""
    ids = set(map(id, optimizer_parameters(optimizer)))
    own = [value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")]
    return not ids.isdisjoint(_integers((own, [hyperparameters(group) for group in optimizer.param_groups])))


def _integers(value: Any) -> Iterator[int]:
    """All integers in nested containers, including keys of dicts."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int):
        yield value


def _is_plain(value: Any, *also: type) -> bool:
    """Whether a value consists of numbers, strings, enums, dtypes, devices, None and instances of ``also`` only."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(each, *also) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each, *also) for each in value.values())
    return value is None or isinstance(value, (Number, str, enum.Enum, torch.dtype, torch.device, *also))


def _awake(group: dict[str, Any]) -> dict[str, Any]:
    """Replace a learning rate of 0, as at the start of a warm-up: with it every optimizer would pass."""
    return {**group, "lr": 1e-3} if "lr" in group and not float(group["lr"]) else group


class Separable:
    """Why each of some optimizers must not have its updates deferred, if so.

    Args:
        optimizers: the optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._reasons = {optimizer: why_not_separable(optimizer) for optimizer in optimizers}
        self._settings: dict[Optimizer, list[Any]] = {}

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._reasons)

    def __contains__(self, optimizer: object) -> bool:
        return optimizer in self._reasons

    def why_not(self, optimizer: Optimizer, *, test_again: bool = False) -> str | None:
        """Return why its updates must not be deferred, or None. Can test again if its settings have changed."""
        if test_again:
            settings = settings_of(optimizer)
            if self._settings.setdefault(optimizer, settings) != settings:
                self._settings[optimizer] = settings
                self._reasons[optimizer] = why_not_separable(optimizer)
        return self._reasons[optimizer]

    def drop_references(self) -> None:
        self._reasons.clear()
        self._settings.clear()


def settings_of(optimizer: Optimizer) -> list[Any]:
    """Which hyperparameters are on: the value of a bool, else the type and whether it is zero.

    Leaves out ``lr``, which schedulers move to zero and back.
    """
    return [
        {
            key: value if isinstance(value, bool) else (type(value), isinstance(value, (int, float)) and not value)
            for key, value in group.items()
            if key not in ("params", "param_names", "lr")
        }
        for group in optimizer.param_groups
    ]
