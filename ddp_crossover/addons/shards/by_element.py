"""Tests on clones whether an optimizer gives the same bits on flat slices of its parameters as on the whole.

If so, ranks may share every parameter. If not, as for optimizers that multiply matrices or take a norm of each layer,
a parameter has one owner, which updates it as a whole.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_crossover.torch_internals.optimizers import raw_step
from ddp_crossover.watching.clone import Clone
from ddp_crossover.watching.optimizer_snapshot import OptimizerSnapshot, ToUpdate, is_of_torch
from ddp_crossover.watching.separability import ask
from ddp_crossover.watching.step_watch import StepWatch
from ddp_crossover.watching.values import same

# Enough for what acts every ten steps. In one of them a slice has zeros only, in the last one element is NaN: some
# optimizers leave a parameter alone then, and must not leave a slice alone.
_STEPS = 12
_STEP_OF_ZEROS = 5
# More than a vector loop of a CPU takes at once, and no multiple of it. None of the cuts is one, either.
_ABOUT_NUMEL = 330
_CUTS = (0.0, 0.11, 0.52, 1.0)
SCALARS = (type(None), bool, int, float, str)
_FUSED = "its fused step on CPU rounds the last elements of a tensor in another way than the others"
_SIXTEEN_BITS = "torch rounds 16-bit parameters on CPU at the end of a tensor in another way, depending on the settings"


def why_not_by_element(optimizer: Optimizer) -> str | None:
    """Why this optimizer must update parameters as a whole; None if it may update flat slices of them.

    Steps a clone with a few small parameters. Does not change the optimizer, its parameters, or the global random
    states of torch, NumPy and Python.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    if any(group.get("fused") and group["params"][0].device.type == "cpu" for group in groups):
        return _FUSED
    if any(p.device.type == "cpu" and p.dtype.itemsize < 4 for group in groups for p in group["params"]):
        return _SIXTEEN_BITS

    def failed(error: Exception) -> str:
        return f"a trial step on flat slices failed ({type(error).__name__}: {error})"

    reason = ask(_differs_in_slices, optimizer, failed)
    # Torch's own do not go by the size of a parameter.
    if reason is None and not is_of_torch(optimizer):
        return ask(_looks_beyond_elements, optimizer, failed)
    return reason


def _looks_beyond_elements(optimizer: Optimizer, with_state: bool) -> str | None:
    """What it does to a parameter of each shape, if that is not what it does to a small flat slice."""
    for group in optimizer.param_groups:
        for parameter in {(p.shape, p.dtype, p.device): p for p in group["params"]}.values():
            shape = list(parameter.shape)
            whole, operation = _trace(optimizer, with_state, parameter, shape)
            if operation is not None:
                return f"it looks at several elements of a parameter of shape {shape} at a time ({operation})"
            if whole != _trace(optimizer, with_state, parameter, [min(parameter.numel(), _ABOUT_NUMEL)])[0]:
                return f"what it does to a parameter of shape {shape} is not what it does to its slices"
    return None


def _trace(
    optimizer: Optimizer, with_state: bool, parameter: Tensor, shape: list[int]
) -> tuple[list[tuple[Any, ...]], str | None]:
    """The operations of its first steps on one parameter, and one of them that looks at several elements at a time."""
    clone = Clone(optimizer, with_state, lambda *_: shape, only=parameter)
    trace: list[tuple[Any, ...]] = []
    for step in range(2):  # the first one makes state
        clone.set_gradients(step)
        with (watch := StepWatch(clone.optimizer, may_communicate=False)):
            raw_step(clone.optimizer)(clone.optimizer)
        trace += watch.trace
        if (operation := watch.seen(()).beyond_elements) is not None:
            return trace, operation
    return trace, None


def _differs_in_slices(optimizer: Optimizer, with_state: bool) -> str | None:
    whole, cut = (Clone(optimizer, with_state, shape_of=_shape) for _ in range(2))
    slices = _Slices(cut)
    for step in range(_STEPS):
        for clone in (whole, cut):
            clone.set_gradients(step)
            _make_special(clone.parameters, step)
        raw_step(whole.optimizer)(whole.optimizer)
        slices.step()
    for parameter, of_slices in zip(whole.parameters, cut.parameters, strict=True):
        if not same(parameter.detach(), of_slices.detach()):
            return "updating a parameter in slices, in a trial on a small clone, gave other values"
        state = whole.optimizer.state.get(parameter, {})
        if not slices.have_state(of_slices, state):
            return "its state of a parameter, in a trial on a small clone, was not that of the slices put together"
    return None


def _make_special(parameters: list[Tensor], step: int) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        gradient = parameter.grad.view(-1)
        if step == _STEP_OF_ZEROS:
            gradient[: int(_CUTS[1] * gradient.numel())] = 0
        elif step == _STEPS - 1:
            gradient[-1:] = float("nan")


def why_not_shared(optimizer: Optimizer) -> str | None:
    """Why ranks cannot share the state that this optimizer makes, whoever has it; None if they can."""
    questions = (_has_odd_state, _has_state_without_gradient)
    # `why_not_separable` tells of an error.
    reasons = (ask(question, optimizer, lambda error: None) for question in questions)
    return next(filter(None, reasons), None) or why_state_stays(optimizer)


def why_state_stays(optimizer: Optimizer) -> str | None:
    """Why what it has of a state, as from a checkpoint, cannot travel to other ranks; None if it can."""
    for key, state in dict.items(optimizer.state):  # a ShardedState shows nothing else
        for name, value in state.items() if isinstance(state, dict) else [("state", state)]:
            if isinstance(key, Tensor) and not isinstance(value, (Tensor, *SCALARS)):
                return f"its state holds a {type(value).__name__} in {name!r}; tensors, numbers and strings travel"
    return None


def _has_state_without_gradient(optimizer: Optimizer, with_state: bool) -> str | None:
    # Shards are updated when their gradients have come, so a rank never steps a parameter that has none. Which have
    # one is known in no step before it: a layer may be unused, or frozen at any time.
    clone = Clone(optimizer, with_state)
    without = clone.parameters[0]
    for step in range(3):
        clone.set_gradients(step)
        if step != 1:
            without.grad = None
        before = copy.deepcopy(clone.optimizer.state.get(without, {}))
        raw_step(clone.optimizer)(clone.optimizer)
        if without.grad is None and not same(before, clone.optimizer.state.get(without, {})):
            return "its step() makes or changes state of parameters that have no gradient, which ranks do not share"
    return None


def _has_odd_state(optimizer: Optimizer, with_state: bool) -> str | None:
    clone = Clone(optimizer, with_state, shape_of=_shape)
    clone.set_gradients(0)
    raw_step(clone.optimizer)(clone.optimizer)
    known = {id(parameter) for parameter in clone.parameters}
    for key in clone.optimizer.state:
        if id(key) not in known:
            return f"it keeps state under {key!r}, which is no parameter"
    return why_state_stays(clone.optimizer)


def unscales_gradients(optimizer: Optimizer) -> bool:
    """Whether a step that a GradScaler has given its scale divides ``.grad`` by it; else it leaves that as it is."""
    return ask(_unscales, optimizer, lambda error: False)


def _unscales(optimizer: Optimizer, with_state: bool) -> bool:
    clone = Clone(optimizer, with_state)
    before = clone.set_gradients(0)
    one = torch.ones((), device=clone.parameters[0].device)
    vars(clone.optimizer).update(grad_scale=2 * one, found_inf=0 * one)
    raw_step(clone.optimizer)(clone.optimizer)
    return not same([parameter.grad for parameter in clone.parameters], before)


class _Slices:
    """Steps the parameters of a clone in slices, as a sharded step does."""

    def __init__(self, clone: Clone) -> None:
        self._clone = clone
        self._state: dict[Any, dict[str, Any]] = {}
        self._bounds: dict[Tensor, list[tuple[int, int]]] = {}
        for parameter in clone.parameters:
            ends = [int(cut * parameter.numel()) for cut in _CUTS]
            bounds = [(low, high) for low, high in itertools.pairwise(ends) if low < high]
            self._bounds[parameter] = bounds or [(0, 0)]
            for low, high in self._bounds[parameter]:
                if state := clone.optimizer.state.get(parameter):
                    self._state[parameter, low] = {
                        key: _slice_of(value, parameter, low, high) for key, value in state.items()
                    }

    def step(self) -> None:
        snapshot = OptimizerSnapshot(self._clone.optimizer, state=self._state)
        for index, group in enumerate(self._clone.optimizer.param_groups):
            updates = []
            for parameter in group["params"]:
                for low, high in self._bounds[parameter]:
                    memory = Parameter(parameter.detach().view(-1)[low:high])
                    memory.grad = parameter.grad.view(-1)[low:high]
                    updates.append(ToUpdate((parameter, low), memory))
            snapshot.step({index: updates})

    def have_state(self, parameter: Tensor, whole: dict[str, Any]) -> bool:
        parts = [self._state.get((parameter, low), {}) for low, _ in self._bounds[parameter]]
        if any(part.keys() != whole.keys() for part in parts):
            return False
        for key, value in whole.items():
            values = [part[key] for part in parts]
            if isinstance(value, Tensor) and value.shape == parameter.shape and values[0].dim() == 1:
                if not same(torch.cat(values), value.view(-1)):
                    return False
            elif (isinstance(value, Tensor) and value.dim()) or not all(same(one, value) for one in values):
                return False
        return True


def _slice_of(value: Any, parameter: Tensor, low: int, high: int) -> Any:
    if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
        return value.view(-1)[low:high].clone()
    return value.clone() if isinstance(value, Tensor) else value


def _shape(dim: int, number: int) -> list[int]:
    """A shape with this many dimensions; ``number`` tells the samples of one kind apart."""
    if not dim:
        return []
    edges = [number + 2] * (dim - 1)
    return [*edges, max(_ABOUT_NUMEL // (number + 2) ** (dim - 1), 1)]
