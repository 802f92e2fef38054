"""Stand-ins for an optimizer: the same class and settings, over some of its parameters.

``optimizer.step()`` runs on a stand-in that has only the parameters whose updates cannot be deferred. Each deferred
update runs on a stand-in with the settings that the optimizer had when ``step()`` was called. So the user's optimizer
is never half-changed: other threads and signal handlers see all its param groups and its whole state at any time.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MappingProxyType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.cpython import is_of_c
from ddp_crossover.torch_internals.optimizers import STEP_HOOKS, raw_step

# Includes `step`, because a learning-rate scheduler wraps it on the instance, to count the calls.
_NOT_TAKEN_OVER = frozenset(("param_groups", "state", "step", *STEP_HOOKS))
_IMMUTABLE = frozenset((NoneType, bool, int, float, str))
CONTAINERS = (list, dict)
_PLAIN = (Number, str, enum.Enum, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type)


class ToUpdate(NamedTuple):
    """What a deferred step updates.

    Attributes:
        parameter: the parameter, or what else its state is kept under.
        memory: a second tensor of its memory, or of a part of it, with the gradient in ``.grad``.
    """

    parameter: Any
    memory: Tensor


class DifferentWrites(RuntimeError):
    """Two updates of a step have changed a setting, and not in the same way."""


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
            setattr(self.optimizer, name, OrderedDict((key, self._for_original(hook)) for key, hook in hooks.items()))

    def use_state(self, state: Any) -> None:
        self.optimizer.state = state

    def _for_original(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda _, args, kwargs: hook(self.original, args, kwargs)

    def take(self, parameters: Sequence[list[Tensor]]) -> None:
        """Set the parameters to step on, given for each param group."""
        self._give_back_settings()
        self._groups = [dict(group) for group in self.original.param_groups]
        self.optimizer.param_groups = [
            {**group, "params": own} for group, own in zip(self._groups, parameters, strict=True)
        ]

    def give_back(self) -> set[str]:
        """Copy what the step has set to the original, and show the original's groups to holders of the stand-in.

        Returns:
            The names of the attributes that the step has set.
        """
        names = _set_since(vars(self.optimizer), vars(self.original))
        for name in names:
            setattr(self.original, name, vars(self.optimizer)[name])
        self._give_back_settings()
        self.optimizer.param_groups = self.original.param_groups
        return names

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
        state: the state to use instead of the optimizer's own.
        caches: names of settings with content that an update may change, see ``caches``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        state: dict[Any, dict[str, Any]] | None = None,
        caches: Set[str] = frozenset(),
    ) -> None:
        self.optimizer = optimizer
        self._state = optimizer.state if state is None else state
        self._originals = {name: value for name, value in vars(optimizer).items() if name not in _NOT_TAKEN_OVER}
        self._attributes = {name: _copied(value) for name, value in self._originals.items()}
        self._given_back: set[str] = set()
        self._shared_state = shared_state(optimizer)
        self._groups = [hyperparameters(group) for group in optimizer.param_groups]
        self._caches = caches
        self._left: list[dict[str, Any]] = []
        # A step may count in a tensor, or in an object, and each update begins with the same count.
        self._written = [
            name
            for name, value in self._attributes.items()
            if name != "defaults" and not name.startswith("_optimizer_") and _can_be_written(value)
        ]
        self._groups_are_written = any(map(_can_be_written, itertools.chain(*map(dict.values, self._groups))))
        self._of_parameters: dict[Tensor, dict[str, Any]] | None = None
        if state is None and reads_attributes(optimizer):
            self._of_parameters = {p: _copied(vars(p)) for p in optimizer_parameters(optimizer) if vars(p)}

    def leave_alone(self, names: set[str]) -> None:
        """Let updates set none of these attributes, which the step has set itself, nor add what it has put into caches.

        The script may change both from now on.
        """
        self._given_back |= names
        self._left = self._contents()

    def _contents(self) -> list[dict[str, Any]]:
        """Copies of what is in the optimizer's caches now."""
        settings = [*self.optimizer.param_groups, attributes_of(self.optimizer)] if self._caches else []
        return [{name: _copied(each[name]) for name in self._caches & each.keys()} for each in settings]

    @property
    def was_skipped(self) -> bool:
        """Whether the step updates nothing, see :func:`was_skipped`."""
        return was_skipped(self._attributes)

    def step(
        self, updates_of: Mapping[int, Sequence[ToUpdate]], attributes: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Update parameters.

        Args:
            updates_of: what to update, by the index of its param group.
            attributes: further attributes that the optimizer has in this step only.
        """
        updates = [update for of_group in updates_of.values() for update in of_group]
        stand_in = _object_like(self.optimizer, self._attributes)
        for name in STEP_HOOKS:
            setattr(stand_in, name, OrderedDict())
        vars(stand_in).update((name, _copied(self._attributes[name])) for name in self._written)
        before = dict(vars(stand_in))
        # Includes all groups, because some optimizers read settings of the first group for all groups.
        groups = map(hyperparameters, self._groups) if self._groups_are_written else self._groups
        stand_in.param_groups = [{**settings, "params": []} for settings in groups]
        for group, of_group in updates_of.items():
            stand_in.param_groups[group]["params"] = [memory for _, memory in of_group]
        # `dict.get`, because the methods of a LazyState would apply pending updates.
        states = [dict.get(self._state, parameter) for parameter, _ in updates]
        stand_in.state = defaultdict(dict, _copied(self._shared_state))
        stand_in.state.update(
            (memory, own) for (_, memory), own in zip(updates, states, strict=True) if own is not None
        )
        try:
            vars(stand_in).update(attributes)
            with _attributes_of_then(updates, self._of_parameters):
                raw_step(stand_in)(stand_in)
        finally:
            for name in attributes:
                del vars(stand_in)[name]
            if stand_in.state:
                for (parameter, memory), known in zip(updates, states, strict=True):
                    if (own := stand_in.state.get(memory)) is not known:
                        dict.__setitem__(self._state, parameter, own)
            self._give_back(vars(stand_in), before)
        if self._caches:
            self._give_back_caches(stand_in)

    def _give_back(self, attributes: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Copy attributes that an update has set to the optimizer, such as a flag that something was checked once.

        Each update begins with the same attributes, and so sets the same; what was set since ``step()`` stays.
        """
        for name in _set_since(attributes, before) - self._given_back:
            if f".{name}" in self._caches and isinstance(attributes[name], CONTAINERS):
                continue
            self._given_back.add(name)
            if vars(self.optimizer).get(name) is self._originals.get(name):
                setattr(self.optimizer, name, attributes[name])

    def _give_back_caches(self, stand_in: Optimizer) -> None:
        """Put what an update has made of a cache into the optimizer's own."""
        attributes = {f".{name}": value for name, value in self._attributes.items()}
        for made, before, left, own in zip(
            [*stand_in.param_groups, attributes_of(stand_in)],
            [*self._groups, attributes],
            self._left,
            [*self.optimizer.param_groups, attributes_of(self.optimizer)],
            strict=True,
        ):
            for name in self._caches & before.keys() & left.keys():
                mine = made.get(name)
                if isinstance(mine, CONTAINERS) and not same(mine, before[name]) and not same(mine, left[name]):
                    if same(own.get(name), left[name]):
                        _fill(own[name], mine)
                    elif not same(own.get(name), mine):
                        raise DifferentWrites(
                            f"its updates change {name!r}, which belongs to no parameter, in different ways"
                        )


def shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """A copy of what its state keeps for all parameters, under keys that are none, such as the number of steps."""
    return {key: _copied(value) for key, value in dict.items(optimizer.state) if not isinstance(key, Tensor)}


def was_skipped(attributes: Mapping[str, Any]) -> bool:
    """Whether a fused optimizer with these attributes updates nothing, because its GradScaler has found infinities."""
    found_inf = attributes.get("found_inf")
    return isinstance(found_inf, Tensor) and bool(found_inf)


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a param group without its parameters and their names."""
    return {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Its attributes that may be settings, by their names with a dot."""
    return {f".{name}": value for name, value in vars(optimizer).items() if name not in _NOT_TAKEN_OVER}


def reads_attributes(optimizer: Optimizer) -> bool:
    """Whether it may read attributes that users set on parameters (``p.scale = ...``); torch's optimizers do not."""
    return not is_of_torch(optimizer)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's own optimizers, and no subclass of one."""
    return type(optimizer).__module__.startswith("torch.optim.")


@contextlib.contextmanager
def _attributes_of_then(
    updates: Sequence[ToUpdate], attributes: Mapping[Tensor, dict[str, Any]] | None
) -> Iterator[None]:
    """Show a step the attributes that parameters had at ``step()``, and copy those that it sets to the parameters."""
    if attributes is None:
        yield
        return
    before = [attributes.get(parameter, {}) for parameter, _ in updates]
    for (_, memory), own in zip(updates, before, strict=True):
        memory.__dict__ = dict(own)
    try:
        yield
    finally:
        for (parameter, memory), own in zip(updates, before, strict=True):
            vars(parameter).update((name, value) for name, value in vars(memory).items() if value is not own.get(name))
            memory.__dict__ = vars(parameter)


def _object_like(optimizer: Optimizer, attributes: Mapping[str, Any]) -> Optimizer:
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update((name, value) for name, value in attributes.items() if name not in _NOT_TAKEN_OVER)
    return made


def _set_since(attributes: Mapping[str, Any], before: Mapping[str, Any]) -> set[str]:
    """Names of the attributes that a step has set."""
    return {name for name, value in attributes.items() if name not in _NOT_TAKEN_OVER and value is not before.get(name)}


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit; NaN equals NaN, and objects are equal if their attributes are."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and bool(torch.all((left == right) | (left.isnan() & right.isnan())))
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple, deque)) and isinstance(right, (list, tuple, deque)):
        return len(left) == len(right) and all(map(same, left, right))
    if type(left) is type(right) and hasattr(left, "__dict__") and not isinstance(left, _PLAIN):
        return same(vars(left), vars(right))
    return bool(left == right or (left != left and right != right))


def copyable(value: Any, *also: type) -> bool:
    """Whether a value consists of numbers, strings, enums, functions and the like, and instances of ``also`` only."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(copyable(each, *also) for each in value)
    if isinstance(value, dict):
        return all(copyable(each, *also) for each in value.values())
    if is_record(value):
        # Not if there are records in it: one of them may be itself.
        return not any(map(is_record, _leaves(vars(value)))) and copyable(vars(value), *also)
    return value is None or isinstance(value, (*_PLAIN, *also))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def is_record(value: Any) -> bool:
    """Whether it is an object of a class in Python that has nothing but its attributes, as of a dataclass."""
    kind: Any = type(value)
    return (
        kind.__new__ is object.__new__
        and not callable(value)
        and not isinstance(value, (*_PLAIN, torch.nn.Module, Optimizer))
        and hasattr(value, "__dict__")
        and all("__slots__" not in vars(each) and not is_of_c(each) for each in kind.__mro__[:-1])
    )


def _can_be_written(value: Any) -> bool:
    return next(writable_parts(value), None) is not None


def writable_parts(value: Any) -> Iterator[Any]:
    """Everything in a setting that can be changed in place, itself included."""
    if type(value) in _IMMUTABLE:
        return
    if isinstance(value, (Tensor, set, *CONTAINERS)) or is_record(value):
        yield value
    parts: Any = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for each in vars(value).values() if is_record(value) else parts:
        yield from writable_parts(each)


def entries_of(name: str, setting: Any) -> dict[str, Any]:
    """What is in a dict or a plain object, by the names that a trial gives it; empty for other settings."""
    if type(setting) is dict:
        return {f"{name}[{key!r}]": each for key, each in setting.items()}
    return {f"{name}.{key}": each for key, each in vars(setting).items()} if is_record(setting) else {}


def _fill(container: Any, content: Any) -> None:
    """Let a list or dict hold something else."""
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)


def _copied(value: Any) -> Any:
    if type(value) in _IMMUTABLE:  # the common case: most optimizers have a dozen in each group
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update((key, _copied(each)) for key, each in value.items())
        return copied
    if isinstance(value, (list, tuple)):
        items = map(_copied, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_record(value):
        record = object.__new__(type(value))
        vars(record).update(_copied(vars(value)))
        return record
    return copy.copy(value) if isinstance(value, set) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, and in attributes of what is in them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in dict.values(value):
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for each in value:
            yield from tensors_in(each)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        yield from tensors_in(vars(value))
