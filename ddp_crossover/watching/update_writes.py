"""What the deferred updates of a step write to what belongs to no parameter: settings, attributes, shared state.

Each update begins with all of that as it was at ``step()``. What a trial has seen change, each update changes alike, so
what the first one sets counts. What no trial and no watched step has changed may be changed by a few updates only, such
as a count of gradients that are too large. There whole numbers add up, and anything else must be set alike by all: each
update after the first one begins with what that has set, so that one that turns it over again is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.torch_internals.optimizers import NO_SETTINGS, STEP_HOOKS
from ddp_crossover.watching.values import CONTAINERS, can_be_written, copied, is_immutable, same

NOT_TAKEN_OVER = frozenset((*NO_SETTINGS, *STEP_HOOKS))
_OF_PARAMETERS = frozenset(("params", "param_names"))

Settings = dict[Any, Any]
_Place = tuple[int, Any]
"""Which of the dicts that ``places`` returns, and the key there."""


class DifferentWrites(RuntimeError):
    """Updates have changed something that belongs to no parameter, and nobody can tell what a whole step would leave.

    Two have changed it in different ways, or one of them is of a part of a parameter, whose rest is updated elsewhere.
    """


def places(optimizer: Optimizer, groups: Sequence[Settings]) -> list[Settings]:
    """The dicts of what belongs to no parameter: these param groups of the optimizer, its attributes, its state."""
    return [*groups, vars(optimizer), optimizer.state]


class UpdateWrites:
    """What the updates of one step have written so far.

    Args:
        optimizer: the optimizer, as it is at ``step()``.
        begun: copies of what is in its ``places``, with which each update begins.
        counters: what a trial has seen change, by the names that ``separability`` gives it; None: everything.
        caches: lists and dicts among these, see ``caches``.
        add_up: whether each update is of whole parameters; if not, nothing may be changed that is no counter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        begun: Sequence[Settings],
        counters: Set[str] | None,
        caches: Set[str],
        *,
        add_up: bool,
    ) -> None:
        self._optimizer = optimizer
        self._begun = begun
        self._counters = counters
        self._caches = caches
        self._add_up = add_up
        self._groups = list(optimizer.param_groups)  # scripts may add some before the updates
        self._originals = [dict(_readable(each)) for each in self._own()]
        self._kept: set[_Place] = set()  # what the step has set itself
        self._given: dict[_Place, Any] = {}
        self._left: list[Settings] = []

    def leave_alone(self) -> None:
        """Let updates set nothing that the step has set itself, nor add what it has put into caches.

        The script may change both from now on.
        """
        own = self._own()
        self._kept |= {
            (place, key)
            for place, (now, original) in enumerate(zip(own, self._originals, strict=True))
            for key, value in _readable(now)
            if value is not original.get(key)
        }
        self._left = [
            {key: copied(value) for key, value in _readable(each) if self._is_cache(place, key, value)}
            for place, each in enumerate(own if self._caches else ())
        ]

    def begin(self, stand_in: Optimizer) -> list[Settings]:
        """What an update begins with, which is about to run on this stand-in."""
        made = places(stand_in, stand_in.param_groups)
        for place, key in self._given:
            if not self._is_counter(place, key):
                start = self._start((place, key))
                made[place][key] = _Count(start) if type(start) is int else copied(start)
        return [dict(_readable(each)) for each in made]

    def end(self, stand_in: Optimizer, before: Sequence[Settings]) -> None:
        """Give the optimizer what an update has changed since it began with ``before``.

        Raises:
            DifferentWrites: if updates have changed something that is not known to be changed alike, and that does not
                add up.
        """
        own = self._own()
        for place, (made, then) in enumerate(zip(places(stand_in, stand_in.param_groups), before, strict=True)):
            deleted = dict(then)
            for key, value in _readable(made):
                if value is not deleted.pop(key, None):
                    self._give(own[place], (place, key), value)
                elif self._is_written(place, key, value):
                    raise self._different((place, key))
            for key in deleted:
                if not self._is_counter(place, key):
                    raise self._different((place, key))
            if self._caches:
                self._give_caches(own[place], made, place)

    def _own(self) -> list[Settings]:
        return places(self._optimizer, self._groups)

    def _give(self, own: Settings, at: _Place, value: Any) -> None:
        place, key = at
        if at in self._kept or self._is_cache(place, key, value):
            return
        if not self._is_counter(place, key):
            if is_immutable(value) and same(value, self._start(at)):
                return
            if not self._add_up:
                raise self._different(at)
            if at in self._given:
                value = self._joined(at, value)
        elif at in self._given:
            return
        if dict.get(own, key) is self._given.get(at, self._originals[place].get(key)):
            dict.__setitem__(own, key, value)
        self._given[at] = value

    def _is_written(self, place: int, key: Any, value: Any) -> bool:
        """Whether an update has written to this, in place, that is no counter."""
        begun = self._start((place, key))
        if value is begun or not can_be_written(value) or self._is_counter(place, key):
            return False
        return not same(value, begun)

    def _start(self, at: _Place) -> Any:
        """What an update begins with that is no counter: numbers that may add up, all from what was there before."""
        begun = self._begun[at[0]].get(at[1])
        return self._given[at] if at in self._given and type(begun) is not int else begun

    def _joined(self, at: _Place, value: Any) -> Any:
        """What an update has set that began with what another one has set."""
        last, start = self._given[at], self._start(at)
        if isinstance(value, _Count) and type(last) is type(start) is int:
            return last + int(value) - start
        # Fractions add up as well, but their last bits depend on the order.
        is_mixed = isinstance(value, (_Count, _Mixed)) or (type(start) is int and type(value) is float)
        if is_mixed or not same(value, last):
            raise self._different(at)
        return last

    def _give_caches(self, own: Settings, made: Settings, place: int) -> None:
        """Put what an update has made of a cache into the optimizer's own."""
        for key, left in self._left[place].items():
            mine = made.get(key)
            if isinstance(mine, CONTAINERS) and not same(mine, self._begun[place].get(key)) and not same(mine, left):
                if same(own.get(key), left):
                    _fill(own[key], mine)
                elif not same(own.get(key), mine):
                    raise self._different((place, key))

    def _name(self, place: int, key: Any) -> str:
        groups = len(self._groups)
        return str(key) if place < groups else f".{key}" if place == groups else f"[{key!r}]"

    def _is_counter(self, place: int, key: Any) -> bool:
        return self._counters is None or self._name(place, key) in self._counters

    def _is_cache(self, place: int, key: Any, value: Any) -> bool:
        return isinstance(value, CONTAINERS) and self._name(place, key) in self._caches

    def _different(self, at: _Place) -> DifferentWrites:
        name = self._name(*at)
        how = "in different ways" if self._add_up else "and shards (shard_optimizer=True) cannot note that"
        return DifferentWrites(f"its updates change {name!r}, which belongs to no parameter, {how}")


class _Count(int):
    """A whole number that stays of this kind when something is added to it, and only then."""


class _Mixed(int):
    """What else was made of one, by which updates do not add up."""


def _makes(name: str, kind: type[int]) -> Callable[..., Any]:
    original = getattr(int, name)

    def method(self: Any, *others: Any) -> Any:
        value = original(self, *others)
        return kind(value) if type(value) is int else value

    return method


for _name in ("__add__", "__radd__", "__sub__"):
    setattr(_Count, _name, _makes(_name, _Count))
for _name in ("rsub", "mul", "rmul", "floordiv", "mod", "pow", "lshift", "rshift", "and", "rand", "or", "ror", "xor",
              "rxor", "neg", "pos", "abs", "invert"):  # fmt: skip
    setattr(_Count, f"__{_name}__", _makes(f"__{_name}__", _Mixed))


def _readable(settings: Settings) -> Iterator[tuple[Any, Any]]:
    for key, value in dict.items(settings):  # not what a LazyState does, which would apply pending updates
        if not isinstance(key, Tensor) and key not in NOT_TAKEN_OVER and key not in _OF_PARAMETERS:
            yield key, value


def _fill(container: Any, content: Any) -> None:
    """Let a list or dict hold something else."""
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)
