"""What a ``step()`` reads from elsewhere than its optimizer and parameters, and what a script may change.

A deferred update would see what such a variable is by then, not what it was at ``step()``. So the code of ``step()``,
and all that it may call, is searched for globals, variables of enclosing functions, and attributes of classes and
modules. Code of torch, NumPy and the standard library is taken to read none, and what a module keeps for itself (a
leading underscore) to be set by its own functions only. Not found is what is looked up by a computed name or imported
inside of a function, and a number among a module's globals in whose place another module puts a new one.
"""

from __future__ import annotations

import builtins
import dis
import enum
import gc
import logging
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from numbers import Number
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NoneType,
    UnionType,
)
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

_TRUSTED = sys.stdlib_module_names | {"numpy", "torch", "triton"}
_CONSTANTS = (Number, str, bytes, NoneType, enum.Enum, torch.dtype, torch.device, torch.layout, TypeVar, UnionType)
_EMPTY = object()


def changeable_setting(optimizer: Optimizer) -> str | None:
    """Something outside of the optimizer that its ``step()`` reads and that may change, in words, or None."""
    search = _Search(optimizer)
    return next(chain(search.attribute("step"), search.private()), None)


class _Search:
    """Goes through all code that a step may run; each method yields what that reads."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._classes: list[type] = [kind for kind in type(optimizer).__mro__ if not _is_trusted(kind.__module__)]
        # What the optimizer itself has under some name hides what its class has.
        self._names = vars(optimizer).keys() - {"step"}
        self._functions: set[FunctionType] = set()
        self._private: list[tuple[str, dict[str, Any]]] = []
        self._codes: dict[int, list[list[CodeType]]] = {}

    def attribute(self, name: str) -> Iterator[str]:
        """Some object's attribute is read: it may be one of any class that was met."""
        if name not in self._names:
            self._names.add(name)
            for kind in list(self._classes):
                yield from self._attribute_of(kind, name)

    def _attribute_of(self, kind: type, name: str) -> Iterator[str]:
        if name in vars(kind) and not name.startswith("__"):
            yield from self._value(vars(kind)[name], f"the class attribute {kind.__name__}.{name}", may_be_rebound=True)

    def _value(self, value: Any, what: str, *, may_be_rebound: bool) -> Iterator[str]:
        if isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, type):
            yield from self._class(value)
        elif (parts := _parts(value, may_be_rebound=may_be_rebound)) is None:
            yield what
        else:
            for part in parts:
                yield from self._value(part, what, may_be_rebound=False)

    def _class(self, kind: type) -> Iterator[str]:
        if kind not in self._classes and not _is_trusted(kind.__module__) and not issubclass(kind, enum.Enum):
            self._classes.append(kind)
            for name in list(self._names):
                yield from self._attribute_of(kind, name)

    def _function(self, function: FunctionType) -> Iterator[str]:
        if function in self._functions:
            return
        self._functions.add(function)
        # Not `__module__`, which `functools.wraps` copies.
        if _is_trusted(function.__globals__.get("__name__")):
            yield from self._value(getattr(function, "__wrapped__", None), "", may_be_rebound=False)
            return
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield from self._value(default, f"a default argument of {function.__name__}()", may_be_rebound=False)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            may_be_rebound = not self._is_argument(function, name)
            yield from self._value(_content(cell), f"{name} of an enclosing function", may_be_rebound=may_be_rebound)
        for code in _with_inner(function.__code__):
            yield from self._code(code, function.__globals__)

    def _code(self, code: CodeType, variables: dict[str, Any]) -> Iterator[str]:
        holder: Any = None
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                holder = variables.get(name, getattr(builtins, name, None))
                yield from self._global(name, holder, variables)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                if not isinstance(holder, (ModuleType, type)):
                    yield from self.attribute(name)
                before, holder = holder, getattr(holder, name, None) if _has_settings(holder) else None
                if holder is not None and not name.startswith("__"):
                    yield from self._value(holder, f"{before.__name__}.{name}", may_be_rebound=True)
            elif instruction.opname != "EXTENDED_ARG":
                holder = None

    def _global(self, name: str, value: Any, variables: dict[str, Any]) -> Iterator[str]:
        what = f"the global variable {name}"
        is_script = variables.get("__name__") == "__main__"
        if any(name in _stored(codes, "STORE_GLOBAL") for codes in self._codes_of(variables)):
            yield what
        if name.startswith("_") and isinstance(value, (dict, list, set)) and not is_script:
            self._private.append((name, variables))
        else:
            # The lines of a script that are in no function cannot be asked what they rebind.
            yield from self._value(value, what, may_be_rebound=is_script)

    def private(self) -> Iterator[str]:
        """Private variables of a module which other functions of it know, too; call it last."""
        reached = {code for function in self._functions for code in _with_inner(function.__code__)}
        for name, variables in self._private:
            others = {code for codes in self._codes_of(variables) for code in codes} - reached
            if any(name in code.co_names for code in others):
                yield f"the global variable {name}"

    def _is_argument(self, function: FunctionType, name: str) -> bool:
        """Whether a variable of an enclosing function is an argument to which nothing else is ever assigned."""
        return any(
            function.__code__ in codes[1:]
            and any(name in code.co_cellvars for code in codes)
            and name not in _stored(codes, "STORE_DEREF")
            for codes in self._codes_of(function.__globals__)
        )

    def _codes_of(self, variables: dict[str, Any]) -> list[list[CodeType]]:
        """Of each function with these globals its code, and after it that of the functions which are made in it."""
        if id(variables) not in self._codes:
            # `type()`: `isinstance()` would wake what loads itself when it is asked.
            functions = [each for each in gc.get_referrers(variables) if type(each) is FunctionType]
            self._codes[id(variables)] = [list(_with_inner(function.__code__)) for function in functions]
        return self._codes[id(variables)]


def _is_trusted(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _TRUSTED


def _has_settings(holder: Any) -> bool:
    """Whether its attributes are such as a script may set one by one."""
    if isinstance(holder, ModuleType):
        return not _is_trusted(holder.__name__)
    if isinstance(holder, (type, FunctionType)):
        return not _is_trusted(holder.__module__) and not isinstance(holder, enum.EnumType)
    return False


def _parts(value: Any, *, may_be_rebound: bool) -> Iterable[Any] | None:
    """What else is read with a value, or None if the value itself, or what bears its name, may change."""
    if isinstance(value, (ModuleType, logging.Logger)):
        return ()
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return (value.fget,)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, (BuiltinMethodType, MethodWrapperType)):
        return (value.__self__,)
    if callable(value) and _is_trusted(type(value).__module__) and not isinstance(value, torch.nn.Module):
        return (getattr(value, "__wrapped__", None),)
    if may_be_rebound:
        return None
    if isinstance(value, _CONSTANTS):
        return ()
    return value if isinstance(value, (tuple, frozenset)) else None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return _EMPTY


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _stored(codes: Iterable[CodeType], opname: str) -> set[str]:
    return {
        instruction.argval
        for code in codes
        if dis.opmap[opname] in code.co_code[::2]
        for instruction in dis.get_instructions(code)
        if instruction.opname == opname
    }
