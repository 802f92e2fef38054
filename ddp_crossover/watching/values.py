"""Values that settings, attributes and state have: compared, copied, and looked into."""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Iterator
from numbers import Number
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.cpython import is_of_c

_IMMUTABLE = frozenset((NoneType, bool, int, float, str))
CONTAINERS = (list, dict)
_PLAIN = (Number, str, enum.Enum, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type)


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


def is_immutable(value: Any) -> bool:
    """Whether it is a plain number, string or None."""
    return type(value) in _IMMUTABLE


def can_be_written(value: Any) -> bool:
    """Whether it, or something in it, can be changed in place."""
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


def copied(value: Any) -> Any:
    """A copy, also of what it consists of; of tensors without their graph."""
    if type(value) in _IMMUTABLE:  # the common case: most optimizers have a dozen in each group
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((key, copied(each)) for key, each in value.items())
        return made
    if isinstance(value, (list, tuple)):
        items = map(copied, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_record(value):
        record = object.__new__(type(value))
        vars(record).update(copied(vars(value)))
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
