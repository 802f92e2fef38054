"""Stand-ins for an optimizer: the same class and settings, over some of its parameters.

``optimizer.step()`` runs on a stand-in that has only the parameters whose updates cannot be deferred. Each deferred
update runs on a stand-in with the settings that the optimizer had when ``step()`` was called. So the user's optimizer
is never half-changed: other threads and signal handlers see all its param groups and its whole state at any time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.torch_internals.optimizers import STEP_HOOKS, raw_step
from ddp_crossover.watching.surroundings import Surroundings
from ddp_crossover.watching.update_writes import NOT_TAKEN_OVER, UpdateWrites
from ddp_crossover.watching.values import can_be_written, copied


class ToUpdate(NamedTuple):
    """What a deferred step updates.

    Attributes:
        parameter: the parameter, or what else its state is kept under.
        memory: a second tensor of its memory, or of a part of it, with the gradient in ``.grad``.
    """

    parameter: Any
    memory: Tensor


class StandIn:
    """Runs ``step()`` in place of an optimizer.

    Attributes:
        original: the optimizer; if it trains two models, this may be the stand-in of the other model.
        optimizer: the stand-in, an object of the same class. It shares the state and has no parameters yet.

    Args:
        original: the optimizer.
        is_ours: whether a step hook is ours, to be left out. The stand-in keeps the others, which run if a subclass
            calls the decorated ``super().step()``.
    """

    def __init__(self, original: Optimizer, is_ours: Callable[[Any], bool]) -> None:
        self.original = original
        self._groups: list[dict[str, Any]] = []
        self.optimizer = _object_like(original, vars(original))
        self.use_state(original.state)
        self.optimizer.param_groups = []
        self.take([[] for _ in original.param_groups])  # a step may read settings before it calls its closure
        for name in STEP_HOOKS:
            hooks = {key: hook for key, hook in getattr(original, name).items() if not is_ours(hook)}
            setattr(self.optimizer, name, OrderedDict((k, _called_with(original, hook)) for k, hook in hooks.items()))

    def use_state(self, state: Any) -> None:
        self.optimizer.state = state

    def take(self, parameters: Sequence[list[Tensor]]) -> None:
        """Set the parameters to step on, given for each param group."""
        self._give_back_settings()
        self._groups = [dict(group) for group in self.original.param_groups]
        self.optimizer.param_groups = [
            {**group, "params": own} for group, own in zip(self._groups, parameters, strict=True)
        ]

    def give_back(self) -> None:
        """Copy what the step has set to the original, and show the original's groups to holders of the stand-in."""
        before = vars(self.original)
        for name, value in list(vars(self.optimizer).items()):
            if name not in NOT_TAKEN_OVER and value is not before.get(name):
                setattr(self.original, name, value)
        self._give_back_settings()
        self.optimizer.param_groups = self.original.param_groups

    def _give_back_settings(self) -> None:
        for mine, before, theirs in zip(
            self.optimizer.param_groups, self._groups, self.original.param_groups, strict=False
        ):
            theirs.update((k, v) for k, v in mine.items() if k != "params" and v is not before.get(k))


class OptimizerSnapshot:
    """An optimizer as it is now, to update some of its parameters later.

    Args:
        optimizer: the optimizer. Its attributes, its hyperparameters and the attributes that users have set on its
            parameters are copied; its state is shared.
        state: the state to use instead of the optimizer's own, of parts of parameters; None: of whole ones.
        counters: what each update changes alike, see ``update_writes``.
        caches: lists and dicts among these, see ``caches``.
        surroundings: those of ``step()``; None if it was called where this is made.

    Attributes:
        optimizer: the optimizer.
        is_of_torch: whether its class was one of torch's own then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        state: dict[Any, dict[str, Any]] | None = None,
        counters: Set[str] | None = None,
        caches: Set[str] = frozenset(),
        surroundings: Surroundings | None = None,
    ) -> None:
        self.optimizer = optimizer
        # Of now: a script may replace both.
        self._class, self._step = type(optimizer), raw_step(optimizer)
        self.is_of_torch = is_of_torch(optimizer)
        self._surroundings = surroundings or Surroundings.now(is_of_torch=self.is_of_torch)
        self._state = optimizer.state if state is None else state
        attributes = ((name, value) for name, value in vars(optimizer).items() if name not in NOT_TAKEN_OVER)
        self._attributes = {name: copied(value) for name, value in attributes}
        self._shared_state = shared_state(optimizer)
        self._groups = [hyperparameters(group) for group in optimizer.param_groups]
        # Torch's own write to parameters and their state alone.
        self._writes: UpdateWrites | None = None
        if not self.is_of_torch:
            begun = [*self._groups, self._attributes, self._shared_state]
            self._writes = UpdateWrites(optimizer, begun, counters, caches, add_up=state is None)
        # A step may count in a tensor, or in an object, and each update begins with the same count.
        self._written = [
            name
            for name, value in self._attributes.items()
            if name != "defaults" and not name.startswith("_optimizer_") and can_be_written(value)
        ]
        self._groups_are_written = any(map(can_be_written, itertools.chain(*map(dict.values, self._groups))))
        self._of_parameters: dict[Tensor, dict[str, Any]] | None = None
        if state is None and reads_attributes(optimizer):
            self._of_parameters = {p: copied(vars(p)) for p in optimizer_parameters(optimizer) if vars(p)}

    def leave_alone(self) -> None:
        """Let updates set nothing that the step, which has ended, has set itself: the script may change that now."""
        if self._writes is not None:
            self._writes.leave_alone()

    @property
    def was_skipped(self) -> bool:
        """Whether the step updates nothing, see :func:`was_skipped`."""
        return was_skipped(self._attributes)

    def step(
        self,
        updates_of: Mapping[int, Sequence[ToUpdate]],
        attributes: Mapping[str, Any] = MappingProxyType({}),
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Update parameters.

        Args:
            updates_of: what to update, by the index of its param group.
            attributes: further attributes that the optimizer has in this step only.
            settings: those that param groups have in this step instead of their own.
        """
        updates = [update for of_group in updates_of.values() for update in of_group]
        stand_in: Optimizer = object.__new__(self._class)
        vars(stand_in).update(self._attributes)
        for name in STEP_HOOKS:
            setattr(stand_in, name, OrderedDict())
        vars(stand_in).update((name, copied(self._attributes[name])) for name in self._written)
        # Includes all groups, because some optimizers read settings of the first group for all groups.
        groups = map(hyperparameters, self._groups) if self._groups_are_written else self._groups
        stand_in.param_groups = [{**own, **settings, "params": []} for own in groups]
        for group, of_group in updates_of.items():
            stand_in.param_groups[group]["params"] = [memory for _, memory in of_group]
        # `dict.get`, because the methods of a LazyState would apply pending updates.
        states = [dict.get(self._state, parameter) for parameter, _ in updates]
        stand_in.state = defaultdict(dict, copied(self._shared_state))
        stand_in.state.update(
            (memory, own) for (_, memory), own in zip(updates, states, strict=True) if own is not None
        )
        before = None if self._writes is None else self._writes.begin(stand_in)
        try:
            vars(stand_in).update(attributes)
            of_then = self._of_parameters
            attributes_of_then = contextlib.nullcontext() if of_then is None else _attributes_of_then(updates, of_then)
            with attributes_of_then, self._surroundings.restored():
                self._step(stand_in)
        finally:
            for name in attributes:
                del vars(stand_in)[name]
            if stand_in.state:
                for (parameter, memory), known in zip(updates, states, strict=True):
                    if (own := stand_in.state.get(memory)) is not known:
                        dict.__setitem__(self._state, parameter, own)
        if self._writes is not None and before is not None:
            self._writes.end(stand_in, before)


def shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """A copy of what its state keeps for all parameters, under keys that are none, such as the number of steps."""
    return {key: copied(value) for key, value in dict.items(optimizer.state) if not isinstance(key, Tensor)}


def was_skipped(attributes: Mapping[str, Any]) -> bool:
    """Whether a fused optimizer with these attributes updates nothing, because its GradScaler has found infinities."""
    found_inf = attributes.get("found_inf")
    return isinstance(found_inf, Tensor) and bool(found_inf)


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a param group without its parameters and their names."""
    return {key: copied(value) for key, value in group.items() if key not in ("params", "param_names")}


def dotted_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Its attributes that may be settings, by their names with a dot, unlike those of param groups."""
    return {f".{name}": value for name, value in vars(optimizer).items() if name not in NOT_TAKEN_OVER}


def reads_attributes(optimizer: Optimizer) -> bool:
    """Whether it may read attributes that users set on parameters (``p.scale = ...``); torch's optimizers do not."""
    return not is_of_torch(optimizer)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's own optimizers, and no subclass of one."""
    return type(optimizer).__module__.startswith("torch.optim.")


@contextlib.contextmanager
def _attributes_of_then(updates: Sequence[ToUpdate], attributes: Mapping[Tensor, dict[str, Any]]) -> Iterator[None]:
    """Show a step the attributes that parameters had at ``step()``, and copy those that it sets to the parameters."""
    before = [attributes.get(parameter, {}) for parameter, _ in updates]
    for (_, memory), own in zip(updates, before, strict=True):
        memory.__dict__ = dict(own)
    try:
        yield
    finally:
        for (parameter, memory), own in zip(updates, before, strict=True):
            vars(parameter).update((name, value) for name, value in vars(memory).items() if value is not own.get(name))
            memory.__dict__ = vars(parameter)


def _called_with(original: Optimizer, hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, args, kwargs: hook(original, args, kwargs)


def _object_like(optimizer: Optimizer, attributes: Mapping[str, Any]) -> Optimizer:
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update((name, value) for name, value in attributes.items() if name not in NOT_TAKEN_OVER)
    return made
