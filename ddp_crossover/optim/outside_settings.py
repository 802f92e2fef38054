"""Searches the code of an optimizer's ``step()`` for settings outside of the optimizer that a script may change.

A deferred update would read such a setting when it is applied, not as it was at ``step()``. So the bytecode of
``step()``, and of everything that it may call, is searched for globals, variables of enclosing functions, attributes of
classes, modules and functions, imports and the environment. The search does not track which object an attribute is read
from: it assumes any class, module or function that the code refers to, and treats any string in the code as a possible
attribute name.

It assumes that code of torch, NumPy and the standard library reads no such settings, and that a module's private
variables (leading underscore) are set only by functions of that module. It does not find names that are computed at run
time, objects that a script puts into a module of torch, class attributes hidden by an attribute of the optimizer, and a
number in a module's globals that another module replaces.
"""

from __future__ import annotations

import builtins
import dis
import enum
import gc
import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from numbers import Number
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    CellType,
    CodeType,
    DynamicClassAttribute,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NoneType,
    UnionType,
)
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from ddp_crossover.torch_internals.compiled import is_compiled_function

# Not `os`: environment variables are settings, too.
_TRUSTED = (sys.stdlib_module_names | {"numpy", "torch", "triton", "typing_extensions"}) - {"os"}
_CONSTANTS = (Number, str, bytes, NoneType, enum.Enum, torch.dtype, torch.device, torch.layout, TypeVar, UnionType)
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_AT_BIRTH = ("__init__", "__new__", "__init_subclass__")  # run when an optimizer or its class is made, not in `step()`
_UNKNOWN = object()
_MENTIONED = ("torch.distributed", "random", "numpy")
_IS_MADE_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE; other types are static, defined in C


def changeable_setting(optimizer: Optimizer) -> str | None:
    """Describe a setting outside of the optimizer that its ``step()`` reads and that may change; None without any."""
    return _Search(optimizer).first()


def mentions(optimizer: Optimizer) -> frozenset[str]:
    """Which of these the code mentions that ``step()`` may run: torch.distributed, torch.compile, random, numpy."""
    search = _Search(optimizer)
    search.first()
    return frozenset(search.mentions)


class _Search:
    """Searches all code that ``step()`` may run, and all values that this code reads."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._own_classes = (*type(optimizer).__mro__, *type(type(optimizer)).__mro__)
        # Attributes of the instance hide class attributes of the same name.
        self._hidden = vars(optimizer).keys() - {"step"}
        # A queue instead of recursion: chains of calls may be longer than Python's recursion limit.
        self._todo: deque[tuple[Any, str, bool]] = deque([(type(optimizer), "", False)])
        self._add("a function that it was given", *_functions_given_to(optimizer))
        self._names = {"step": None}  # a dict keeps its order, so that all ranks name the same reason
        self._holders: dict[int, Any] = {}
        self._functions: set[FunctionType] = set()
        self.mentions: set[str] = set()
        self._private: list[tuple[str, dict[str, Any]]] = []
        self._modules: dict[int, _Module] = {}

    def first(self) -> str | None:
        """The first changeable setting that is found, or None."""
        while self._todo:
            value, what, may_be_rebound = self._todo.popleft()
            self._note_mentions(getattr(value, "__name__", ""), getattr(value, "__module__", ""))
            self._note_mentions(type(value).__module__)
            if value is torch.compile or is_compiled_function(value):
                self.mentions.add("torch.compile")
            if isinstance(value, logging.Logger):
                continue  # frameworks put methods of their own into its class, but they log
            if isinstance(value, FunctionType):
                self._function(value)
            elif isinstance(value, type):
                for kind in value.__mro__:
                    self._meet(kind)
            elif isinstance(value, ModuleType) and not _is_trusted(value.__name__):
                self._meet(value)
            elif (parts := _parts(value, may_be_rebound=may_be_rebound)) is None:
                return what
            else:
                self._add(what, *parts)
            if id(type(value)) not in self._holders:
                self._add(what, type(value))
        return next(self._shared_private_variables(), None)

    def _note_mentions(self, *names: Any) -> None:
        for name in names:
            self.mentions |= {
                each for each in _MENTIONED if isinstance(name, str) and f"{name}.".startswith(f"{each}.")
            }

    def _add(self, what: str, *values: Any, may_be_rebound: bool = False) -> None:
        self._todo += [(value, what, may_be_rebound) for value in values]

    def _read(self, name: str) -> None:
        """Note that the code reads an attribute of this name, and look it up in all that was met so far."""
        if name not in self._names:
            self._names[name] = None
            if name in ("distributed", "compile"):
                self.mentions.add(f"torch.{name}")
            for holder in self._holders.values():
                self._look_up(holder, name)

    def _meet(self, holder: Any) -> None:
        if id(holder) not in self._holders:
            self._holders[id(holder)] = holder
            for name in list(vars(holder)):
                self._look_up(holder, name)

    def _look_up(self, holder: Any, name: str) -> None:
        if name not in vars(holder):
            return
        kind = "class attribute" if isinstance(holder, type) else "attribute"
        value, what = vars(holder)[name], f"the {kind} {holder.__name__}.{name}"
        is_own = holder in self._own_classes
        if isinstance(holder, type) and _is_trusted_class(holder):
            # Look at functions only: a script may have replaced a method of a trusted class.
            if isinstance(value, FunctionType):
                self._add(what, value)
        elif name.startswith("__"):
            # Python calls special methods without naming them in the bytecode.
            if (callable(value) or isinstance(value, classmethod)) and not (is_own and name in _AT_BIRTH):
                self._add(what, value)
        elif name in self._names and not (is_own and name in self._hidden):
            self._add(what, value, may_be_rebound=not isinstance(holder, enum.EnumType))

    def _function(self, function: FunctionType) -> None:
        if function in self._functions:
            return
        self._functions.add(function)
        # Not by `__module__`, which `functools.wraps` copies.
        if _is_trusted(function.__globals__.get("__name__")):
            self._add(f"a function that {function.__name__}() calls", *_wrapped(function))
            return
        self._meet(function)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._add(f"a default argument of {function.__name__}()", *defaults)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            may_be_rebound = not self._is_argument(function, name)
            self._add(f"{name} of an enclosing function", _content(cell), may_be_rebound=may_be_rebound)
        for code in _with_inner(function.__code__):
            self._code(code, function.__globals__)

    def _code(self, code: CodeType, variables: dict[str, Any]) -> None:
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in _GLOBALS:
                self._global(name, variables)
            elif instruction.opname in _ATTRIBUTES:
                self._read(name)
            elif instruction.opname == "IMPORT_NAME":
                self._note_mentions(name)
                if not _is_trusted(name):
                    self._add(f"the module {name} (imported while it runs)", _UNKNOWN)
        for text in _texts(code.co_consts):
            self._read(text)

    def _global(self, name: str, variables: dict[str, Any]) -> None:
        value, what = variables.get(name, getattr(builtins, name, None)), f"the global variable {name}"
        module = self._module(variables)
        if name in module.rebound:
            self._add(what, _UNKNOWN)
        elif name.startswith("_") and isinstance(value, (dict, list, set)) and not module.may_rebind_all:
            self._private.append((name, variables))
        else:
            self._add(what, value, may_be_rebound=module.may_rebind_all)

    def _shared_private_variables(self) -> Iterator[str]:
        """Private variables that are also used by functions of their module which ``step()`` does not run."""
        reached = {code for function in self._functions for code in _with_inner(function.__code__)}
        for name, variables in self._private:
            others = set(chain.from_iterable(self._module(variables).codes)) - reached
            if any(name in code.co_names for code in others):
                yield f"the global variable {name}"

    def _is_argument(self, function: FunctionType, name: str) -> bool:
        """Whether a variable of an enclosing function is an argument that is never assigned to."""
        return any(
            function.__code__ in codes[1:]
            and any(name in code.co_cellvars for code in codes)
            and name not in _stored(codes, "STORE_DEREF")
            for codes in self._module(function.__globals__).codes
        )

    def _module(self, variables: dict[str, Any]) -> _Module:
        if id(variables) not in self._modules:
            self._modules[id(variables)] = _Module(variables)
        return self._modules[id(variables)]


def _functions_given_to(optimizer: Optimizer) -> Iterator[Any]:
    """Functions and classes in its attributes, its param groups and the attributes of its parameters."""
    todo: list[Any] = [
        value for name, value in vars(optimizer).items() if name not in ("param_groups", "state", "step")
    ]
    for group in optimizer.param_groups:
        todo += [value for name, value in group.items() if name != "params"]
        todo += [vars(parameter) for parameter in group["params"]]
    while todo:
        value = todo.pop()
        if isinstance(value, OrderedDict):
            continue  # hooks, which an update does not run
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo += value
        elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            yield value


class _Module:
    """How the functions of a module may change its globals."""

    def __init__(self, variables: dict[str, Any]) -> None:
        # `type()`, because `isinstance()` would trigger objects that are loaded lazily.
        functions = [each for each in gc.get_referrers(variables) if type(each) is FunctionType]
        # For each function its code, followed by the code of functions defined inside of it.
        self.codes = [list(_with_inner(function.__code__)) for function in functions]
        codes = list(chain.from_iterable(self.codes))
        self.rebound = _stored(codes, "STORE_GLOBAL")
        # The globals rebound by `globals()[name] = ...`, or by top-level lines of a script, cannot be determined.
        self.may_rebind_all = _is_script(variables) or any("globals" in code.co_names for code in codes)


def _is_script(variables: dict[str, Any]) -> bool:
    """Whether top-level lines of this module may still run."""
    frames: Iterable[FrameType | None] = sys._current_frames().values()
    while frames := [frame for frame in frames if frame is not None]:
        if any(frame.f_globals is variables and frame.f_code.co_name == "<module>" for frame in frames):
            return True
        frames = [frame.f_back for frame in frames]
    return variables.get("__name__") == "__main__"


def _is_trusted(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _TRUSTED


def _is_trusted_class(kind: type) -> bool:
    """Whether a trusted module defines this class.

    ``__module__`` is not enough: ``exec()`` and ``types.new_class()`` may give it a trusted name for a user's class.
    """
    return _is_trusted(kind.__module__) and (
        not kind.__flags__ & _IS_MADE_AT_RUN_TIME
        or getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    )


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


def _parts(value: Any, *, may_be_rebound: bool) -> Iterable[Any] | None:
    """Other values that using this value may read; None if it may change, or its name may be rebound."""
    if isinstance(value, ModuleType):
        return ()
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, (property, DynamicClassAttribute)):
        return (value.fget,)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, (BuiltinMethodType, MethodWrapperType)):
        return (value.__self__,)
    if callable(value) and _is_trusted_class(type(value)) and not isinstance(value, torch.nn.Module):
        return _wrapped(value)
    if may_be_rebound:
        return None
    if isinstance(value, _CONSTANTS):
        return ()
    return value if isinstance(value, (tuple, frozenset)) else None


def _wrapped(value: Any) -> Iterator[Any]:
    """The functions that a decorator of a trusted module has wrapped."""
    attributes = getattr(value, "__dict__", {})
    yield attributes.get("__wrapped__")
    # `functools.singledispatch` dispatches to these.
    if isinstance(implementations := attributes.get("registry"), MappingProxyType):
        yield from implementations.values()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _UNKNOWN


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
