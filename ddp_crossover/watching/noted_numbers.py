"""Numbers that note how code compares them, so that others that compare alike may stand for them.

Most settings only enter arithmetic, or are compared with zero. Their exact values decide nothing about which operations
a step makes, so a schedule may change them.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from ddp_crossover.walks import is_tree
from ddp_crossover.watching.values import copyable, is_record, parts_of

_ARITHMETIC = ("add", "sub", "mul", "truediv", "pow")
_COMPARISONS = {f"__{name}__": getattr(operator, name) for name in ("lt", "le", "eq", "ne", "gt", "ge")}
_OF_THE_VALUE = ("__hash__", "__int__", "__trunc__", "__floor__", "__ceil__", "__round__", "__mod__", "__rmod__")
_MORE = ("__floordiv__", "__rfloordiv__", "__divmod__", "__str__", "__repr__", "__format__", "is_integer", "hex")


class Comparisons:
    """How settings were compared.

    Attributes:
        by_name: for each setting, the functions and other numbers that it was compared with; None if its value itself
            has decided about something.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, set[tuple[Callable[[Any, Any], Any], float]] | None] = {}
        self._is_listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which comparisons are noted."""
        self._is_listening = True
        try:
            yield
        finally:
            self._is_listening = False

    def noted(self, name: str, value: Any) -> Any:
        """The value of a setting, with numbers that note comparisons; also inside of containers and records."""
        if type(value) is float or isinstance(value, np.floating):
            return NotedNumber(float(value), self, (name,), is_itself=True)
        if type(value) in (tuple, list):
            return type(value)(self.noted(f"{name}[{index}]", each) for index, each in enumerate(value))
        if type(value) is dict:
            return {key: self.noted(f"{name}[{key!r}]", each) for key, each in value.items()}
        if is_record(value):
            vars(value).update((key, self.noted(f"{name}.{key}", each)) for key, each in vars(value).items())
        return value

    def note(self, names: tuple[str, ...], compared: tuple[Callable[[Any, Any], Any], float] | None) -> None:
        for name in names if self._is_listening else ():
            if compared is None:
                self.by_name[name] = None
            elif (known := self.by_name.setdefault(name, set())) is not None:
                known.add(compared)

    def kind(self, name: str, value: Any) -> Hashable:
        """What is the same for all values of a setting that code cannot tell apart."""
        return self._kind(name, value) if is_tree(value, parts_of) else _Itself(value)

    def _kind(self, name: str, value: Any) -> Hashable:
        if type(value) in (tuple, list):
            return tuple(self._kind(f"{name}[{index}]", each) for index, each in enumerate(value))
        if type(value) is dict:
            return tuple((key, self._kind(f"{name}[{key!r}]", each)) for key, each in value.items())
        if isinstance(value, Tensor):
            return value.dtype, value.dim()
        if not isinstance(value, (float, np.floating)):
            if not copyable(value, Tensor):  # as a hook's handle
                return _Itself(value)
            if is_record(value):
                return type(value), tuple((key, self._kind(f"{name}.{key}", each)) for key, each in vars(value).items())
            return type(value), value if isinstance(value, Hashable) else repr(value)
        sign = int(value > 0) - int(value < 0)  # of numpy, too: its booleans cannot be subtracted
        compared = self.by_name.get(name, set())
        if compared is None:
            return value
        outcomes = tuple(sorted((c.__name__, other, bool(c(value, other))) for c, other in compared))
        return type(value), sign, math.isfinite(value), outcomes


class _Itself:
    """Equals what stands for the same object, whatever comparing two such objects would do."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class NotedNumber(float):
    """A float, or what was computed from one."""

    def __new__(cls, value: float, comparisons: Comparisons, names: tuple[str, ...], *, is_itself: bool) -> NotedNumber:
        made = super().__new__(cls, value)
        made._comparisons, made._names, made._is_itself = comparisons, names, is_itself  # type: ignore[attr-defined]
        return made

    def __deepcopy__(self, memo: Any) -> NotedNumber:
        return self

    def __copy__(self) -> NotedNumber:
        return self

    def item(self) -> NotedNumber:  # of NumPy's numbers
        return self


def _computes(name: str) -> Any:
    original = getattr(float, name)

    def method(self: Any, *others: Any) -> Any:
        value = original(self, *others)
        if type(value) is not float:
            return value
        names = dict.fromkeys(name for each in (self, *others) for name in getattr(each, "_names", ()))
        return NotedNumber(value, self._comparisons, tuple(names), is_itself=False)

    return method


def _compares(name: str, function: Callable[[Any, Any], Any]) -> Any:
    original = getattr(float, name)

    def method(self: Any, other: Any) -> Any:
        if isinstance(other, (int, float)):
            is_plain = self._is_itself and not isinstance(other, NotedNumber)
            self._comparisons.note(self._names, (function, float(other)) if is_plain else None)
            self._comparisons.note(getattr(other, "_names", ()), None)
        return original(self, other)

    return method


def _shows(name: str) -> Any:
    original = getattr(float, name)

    def method(self: Any, *others: Any) -> Any:
        self._comparisons.note(self._names, None)
        return original(self, *others)

    return method


def _is_true(self: Any) -> bool:
    self._comparisons.note(self._names, (operator.ne, 0.0) if self._is_itself else None)
    return float.__bool__(self)


for _name in (*(f"__{each}__" for each in _ARITHMETIC), *(f"__r{each}__" for each in _ARITHMETIC)):
    setattr(NotedNumber, _name, _computes(_name))
for _name in ("__neg__", "__abs__", "__pos__"):
    setattr(NotedNumber, _name, _computes(_name))
for _name, _function in _COMPARISONS.items():
    setattr(NotedNumber, _name, _compares(_name, _function))
for _name in (*_OF_THE_VALUE, *_MORE):
    setattr(NotedNumber, _name, _shows(_name))
NotedNumber.__bool__ = _is_true  # type: ignore[method-assign]
