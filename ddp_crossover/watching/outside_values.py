"""Values outside of an optimizer that its ``step()`` reads, as they were when it was judged.

Such values seldom change. A deferred update finds them as they were then, and an optimizer of which one has changed
waits from then on.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, FunctionType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_crossover.walks import is_tree

_SIMPLE = frozenset((NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout))
_CONTAINERS = (tuple, list, dict, set, frozenset)
_THEMSELVES = (type, FunctionType, BuiltinFunctionType, type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
_MOST_LEAVES = 1000  # to compare more in each step takes time
ABSENT = object()


class Place(NamedTuple):
    """Where code finds a value.

    Attributes:
        holder: the globals of a module, a class, a module, a function, or the cell of an enclosing function.
        name: the name of the variable or attribute.
        what: how to call it.
    """

    holder: Any
    name: str
    what: str

    def read(self) -> Any:
        if (variables := self.variables()) is not None:
            return variables.get(self.name, ABSENT)
        return _content(self.holder) if isinstance(self.holder, CellType) else getattr(self.holder, self.name)

    def variables(self) -> Mapping[str, Any] | None:
        """The variables among which it is; None for a cell, and for the default arguments of a function."""
        if isinstance(self.holder, CellType) or self.name in ("__defaults__", "__kwdefaults__"):
            return None
        return self.holder if isinstance(self.holder, dict) else vars(self.holder)

    def write(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif not isinstance(self.holder, dict):
            delattr(self.holder, self.name) if value is ABSENT else setattr(self.holder, self.name, value)
        elif value is ABSENT:
            self.holder.pop(self.name, None)
        else:
            self.holder[self.name] = value


class _Then(NamedTuple):
    place: Place
    value: Any
    copied: Any  # what may be shown to code that changes it
    shown: Any  # of something plain, which equals what is shown alike

    def is_now(self) -> bool:
        value = self.place.read()
        if value is self.value and value is self.copied:
            return True
        return self.shown is not None and is_plain(value) and _shown(value) == self.shown


class OutsideValues:
    """The values that are in these places now."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self._then = [
            _Then(place, value, _copied(value), _shown(value) if is_plain(value) else None)
            for place, value in ((place, place.read()) for place in places)
        ]
        # Most are found to be the same objects, which takes less time than a call for each.
        self._fixed = [
            (variables, then.place.name, then.value)
            for then in self._then
            if then.copied is then.value and (variables := then.place.variables()) is not None
        ]
        self._others = [then for then in self._then if then.copied is not then.value or then.place.variables() is None]

    def items(self) -> Iterator[tuple[str, Any]]:
        """What each is called, and its value."""
        for then in self._then:
            yield then.place.what, then.value

    def changed(self) -> str | None:
        """One of them that is another one now, by its name; or None."""
        if all(variables.get(name, ABSENT) is value for variables, name, value in self._fixed) and all(
            then.is_now() for then in self._others
        ):
            return None
        return next((then.place.what for then in self._then if not then.is_now()), None)

    @contextlib.contextmanager
    def shown(self, *, copies: bool = False) -> Iterator[list[str]]:
        """Context in which code finds the values of then. Yields a list of those that it changes, filled at the end.

        Args:
            copies: whether to show copies, and undo all changes.
        """
        away = [] if not copies and self.changed() is None else self._then
        before = [(then.place, then.place.read()) for then in away]
        for then in away:
            if (copies and then.copied is not then.value) or not then.is_now():
                then.place.write(_copied(then.copied))
        written: list[str] = []
        try:
            yield written
        finally:
            if self.changed() is not None:
                written += [then.place.what for then in self._then if not then.is_now()]
            for place, value in before:
                if place.read() is not value:
                    place.write(value)


def leaves(value: Any) -> list[Any]:
    """What a tree of containers holds that is none, up to a number of them that takes too long to compare."""
    left: list[Any] = [value]
    found: list[Any] = []
    while left and len(found) <= _MOST_LEAVES:
        each = left.pop()
        if type(each) in _CONTAINERS:
            left += _parts_of(each)
        else:
            found.append(each)
    return found


def _parts_of(value: Any) -> Collection[Any]:
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    return value if type(value) in _CONTAINERS else ()


def is_plain(value: Any) -> bool:
    """Whether a value consists of some numbers, strings, functions, classes and the like."""
    return (
        is_tree(value, _parts_of)
        and len(found := leaves(value)) <= _MOST_LEAVES
        and all(type(each) in _SIMPLE or isinstance(each, (np.generic, enum.Enum, *_THEMSELVES)) for each in found)
    )


def is_fixed(value: Any) -> bool:
    """Whether a value holds nothing that can be changed in place, as far as is known."""
    return _copied(value) is value


def _shown(value: Any) -> Any:
    """What is the same for equal values of the same types only."""
    if type(value) is dict:
        return dict, tuple((_shown(key), _shown(each)) for key, each in value.items())
    if type(value) in (set, frozenset):  # a copy may have another order
        return type(value), frozenset(map(_shown, value))
    if type(value) in _CONTAINERS:
        return type(value), tuple(map(_shown, value))
    return id(value) if isinstance(value, _THEMSELVES) else (type(value), repr(value))


def _copied(value: Any) -> Any:
    """A copy of something plain; an immutable value, or anything else, itself."""
    return copy.deepcopy(value) if type(value) in _CONTAINERS and is_plain(value) else value


def _content(cell: CellType) -> Any:
    """What a variable of an enclosing function holds; an object of its own if it was not assigned to yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT
