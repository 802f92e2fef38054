"""Values that settings, attributes and state have: compared, copied, and looked into."""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Collection, Iterator
from numbers import Number
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.cpython import is_of_c
from ddp_crossover.walks import HOLD_NOTHING, is_tree, walk

CONTAINERS = (list, dict)
_PLAIN = (Number, str, enum.Enum, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type)


def parts_of(value: Any) -> Collection[Any]:
    """What is directly in a container, without keys of dicts, or in the attributes of a record."""
    if type(value) in HOLD_NOTHING:  # most optimizers have a dozen such settings in each group
        return ()
    if isinstance(value, dict):
        return dict.values(value)  # not what a LazyState does, which would apply pending updates
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    return vars(value).values() if is_record(value) else ()


def all_in(value: Any) -> Iterator[Any]:
    """A value, and all that its containers and records hold, see ``walk``."""
    return walk(value, parts_of)


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit; NaN equals NaN, and objects are equal if their attributes are."""
    todo, seen = [(left, right)], set()
    while todo:
        left, right = todo.pop()
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            if not _same_tensors(left, right):
                return False
            continue
        if type(left) is type(right) and not isinstance(left, (*_PLAIN, *_COMPARED)) and hasattr(left, "__dict__"):
            left, right = vars(left), vars(right)
        if isinstance(left, dict) and isinstance(right, dict):
            if left.keys() != right.keys():
                return False
            pairs = [(left[key], right[key]) for key in left]
        elif isinstance(left, _ROWS) and isinstance(right, _ROWS):
            if len(left) != len(right):
                return False
            pairs = list(zip(left, right, strict=True))
        elif left == right or (left != left and right != right):
            continue
        else:
            return False
        if (id(left), id(right)) not in seen:  # else they lead back to themselves
            seen.add((id(left), id(right)))
            todo += reversed(pairs)
    return True


_ROWS = (list, tuple, deque)
_COMPARED = (dict, *_ROWS)  # by what is in them, and not by their attributes


def _same_tensors(left: Tensor, right: Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and bool(torch.all((left == right) | (left.isnan() & right.isnan())))
    )


def copyable(value: Any, *also: type) -> bool:
    """Whether a value consists of numbers, strings, enums, functions and the like, and instances of ``also`` only."""
    if type(value) in HOLD_NOTHING:
        return True
    known: tuple[Any, ...] = (NoneType, list, tuple, set, frozenset, dict, *_PLAIN, *also)
    return is_tree(value, parts_of) and all(
        isinstance(each, known)
        # Not if there are records in it.
        or (is_record(each) and not any(map(is_record, all_in(vars(each)))))
        for each in all_in(value)
    )


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
    return type(value) in HOLD_NOTHING


def can_be_written(value: Any) -> bool:
    """Whether it, or something in it, can be changed in place."""
    return type(value) not in HOLD_NOTHING and next(writable_parts(value), None) is not None


def writable_parts(value: Any) -> Iterator[Any]:
    """Everything in a setting that can be changed in place, itself included, as often as it is there."""
    for each in all_in(value):
        if type(each) not in HOLD_NOTHING and (isinstance(each, (Tensor, set, *CONTAINERS)) or is_record(each)):
            yield each


def entries_of(name: str, setting: Any) -> dict[str, Any]:
    """What is in a dict or a plain object, by the names that a trial gives it; empty for other settings."""
    if type(setting) is dict:
        return {f"{name}[{key!r}]": each for key, each in setting.items()}
    return {f"{name}.{key}": each for key, each in vars(setting).items()} if is_record(setting) else {}


def copied(value: Any) -> Any:
    """A copy, also of what it consists of; of tensors without their graph. What is not copyable stays as it is."""
    if type(value) in HOLD_NOTHING:
        return value
    return _copied(value) if is_tree(value, parts_of) else value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((key, _copied(each)) for key, each in value.items())
        return made
    if isinstance(value, (list, tuple)):
        items = map(_copied, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_record(value):
        record = object.__new__(type(value))
        vars(record).update(_copied(vars(value)))
        return record
    return copy.copy(value) if isinstance(value, set) else value


def is_constant(value: Any, levels: int = 3) -> bool:
    """Whether nothing in it can be changed in place: numbers, functions and the like, and tuples of these."""
    if type(value) in HOLD_NOTHING or isinstance(value, _CONSTANT):
        return True
    is_tuple = levels > 0 and isinstance(value, (tuple, frozenset))
    return is_tuple and all(is_constant(each, levels - 1) for each in value)


_CONSTANT = (*_PLAIN, NoneType, bytes, np.generic, torch.memory_format, torch.layout)


def insides_of(value: Any) -> Collection[Any]:
    """What is directly in a container, or in the attributes of any object but tensors, functions and the like."""
    if type(value) in HOLD_NOTHING or isinstance(value, (Tensor, *_PLAIN)):
        return ()
    return parts_of(value) or getattr(value, "__dict__", {}).values()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, and in attributes of what is in them."""
    return (each for each in walk(value, _parts_or_attributes) if isinstance(each, Tensor))


def _parts_or_attributes(value: Any) -> Collection[Any]:
    if isinstance(value, (*_COMPARED, set, frozenset)):
        return parts_of(value)
    is_opaque = isinstance(value, (Tensor, type, torch.nn.Module)) or callable(value)
    return () if is_opaque or not hasattr(value, "__dict__") else vars(value).values()
