"""Searches the code of an optimizer's ``step()`` for settings outside of the optimizer that a script may change.

A deferred update would find such a setting as it is when it is applied, not as it was at ``step()``. So the bytecode of
``step()``, and of everything that it may call, is searched for globals, variables of enclosing functions, attributes of
classes, modules and functions, imports and the environment. Places of numbers, strings and the like, and of functions,
can be followed, see ``outside_values``; anything else there is a reason to wait. The search does not track which object
an attribute is read from: it assumes any class, module or function that the code refers to, and treats any string in
the code as a possible attribute name.

It assumes that code of torch, NumPy and the standard library reads no such settings, except what reads files. It does
not find names that are computed at run time, objects that a script puts into a module of torch, and class attributes
hidden by an attribute of the optimizer.
"""

from __future__ import annotations

import builtins
import ctypes
import enum
import gc
import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from numbers import Number
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    CodeType,
    DynamicClassAttribute,
    EllipsisType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NoneType,
    NotImplementedType,
    UnionType,
)
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer

from ddp_crossover.cpython import Lookup, frames_of_threads, is_of_c, lookups, with_inner
from ddp_crossover.torch_internals.compiled import is_compiled_function
from ddp_crossover.torch_internals.optimizers import attributes_of
from ddp_crossover.walks import walk
from ddp_crossover.watching.outside_values import ABSENT, OutsideValues, Place, is_fixed, is_plain, leaves
from ddp_crossover.watching.values import is_record, parts_of

# Not `os`: environment variables are settings, too.
_TRUSTED = (sys.stdlib_module_names | {"numpy", "torch", "triton", "typing_extensions"}) - {"os"}
_CONSTANTS = (
    Number,
    str,
    bytes,
    NoneType,
    EllipsisType,
    NotImplementedType,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    ctypes.CDLL,
    TypeVar,
    UnionType,
)
_AT_BIRTH = ("__init__", "__new__", "__init_subclass__")  # run when an optimizer or its class is made, not in `step()`
_UNKNOWN = object()
_LONGEST_NAME = 200
_STATES_OF_GENERATORS = ("default_generator", "default_generators", "get_rng_state", "initial_seed")
_STATES_OF_GROUPS = ("is_initialized", "get_rank", "get_world_size")  # a script may destroy them before an update
_MENTIONED = ("torch.distributed", "random", "numpy")
_MODULES_OF_FILES = ("io", "pathlib", "glob", "genericpath", "posixpath", "ntpath", "posix", "nt")
_READ_FILES = ("load", "loadtxt", "fromfile", "memmap")  # functions of torch and NumPy


class Outside(NamedTuple):
    """What the code that ``step()`` may run refers to outside of the optimizer.

    Attributes:
        unknown: something that may change and cannot be followed, or None.
        values: what else may change.
        mentions: which of these it mentions: torch.distributed, torch.compile, random, numpy, param_names.
    """

    unknown: str | None = None
    values: OutsideValues = OutsideValues()
    mentions: frozenset[str] = frozenset()


def outside(optimizer: Optimizer) -> Outside:
    """Search the code of an optimizer's ``step()``."""
    search = _Search(optimizer)
    unknown = search.first_unknown()
    return Outside(unknown, OutsideValues(search.places()), frozenset(search.mentions))


class _Search:
    """Searches all code that ``step()`` may run, and all values that this code reads."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._own_classes = (*type(optimizer).__mro__, *type(type(optimizer)).__mro__)
        # Attributes of the instance hide class attributes of the same name.
        self._hidden = {"param_groups", "state", *attributes_of(optimizer)}
        # A queue instead of recursion: chains of calls may be longer than Python's recursion limit.
        self._todo: deque[tuple[Any, str, Place | None]] = deque([(type(optimizer), "", None)])
        self._add("a function that it was given", *_functions_given_to(optimizer))
        self._names = {"step": None}  # a dict keeps its order, so that all ranks name the same reason
        self._holders: dict[int, Any] = {}  # of which the attributes that the code reads are followed
        self._records: dict[int, Any] = {}  # of which all are
        self._functions: set[FunctionType] = set()
        self.mentions: set[str] = set()
        self._private: list[tuple[str, dict[str, Any]]] = []
        self._places: dict[tuple[int, str], Place] = {}
        self._met: dict[int, Any] = {}  # values without a place, by id: one may lead back to itself
        self._asked: dict[str, None] = {}

    def first_unknown(self) -> str | None:
        """The first setting that may change and cannot be followed, or None."""
        while self._todo:
            value, what, place = self._todo.popleft()
            if place is None:
                if id(value) in self._met:
                    continue
                self._met[id(value)] = value
            self._note_mentions(getattr(value, "__name__", ""), getattr(value, "__module__", ""))
            self._note_mentions(type(value).__module__)
            if value is torch.compile or is_compiled_function(value):
                self.mentions.add("torch.compile")
            if getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None) in _MODULES_OF_FILES:
                return f"files ({what})"
            if isinstance(value, logging.Logger):
                continue  # frameworks put methods of their own into its class, but they log
            if isinstance(value, FunctionType):
                self._function(value)
            elif isinstance(value, type):
                for kind in value.__mro__:
                    self._meet(kind)
            elif isinstance(value, ModuleType) and not _is_trusted(value.__name__):
                self._meet(value)
            elif place is not None and is_plain(value) and not callable(value):
                for each in leaves(value):
                    if isinstance(each, str):
                        self._read(each)
                    elif each is not value:
                        self._add(what, each)
            elif value is ABSENT and place is not None and is_record(place.holder):
                pass
            elif (parts := _parts(value)) is not None:
                self._add(what, *parts)
            elif is_record(value):
                self._record(value, what)
            else:
                return what
            if place is not None and not isinstance(value, ModuleType):
                self._places[id(place.holder), place.name] = place
            if id(type(value)) not in self._holders:
                self._add(what, type(value))
        return next(self._shared_private_variables(), None)

    def places(self) -> list[Place]:
        """Where values are that may change, or may come to be: classes may get attributes that hide those of others."""
        classes = [holder for holder in self._holders.values() if isinstance(holder, type)]
        hiding = [
            place._replace(holder=heir, what=f"the class attribute {heir.__name__}.{place.name}")
            for place in self._places.values()
            for heir in (classes if isinstance(place.holder, type) else ())
            if heir is not place.holder and issubclass(heir, place.holder) and not _is_trusted_class(heir)
        ]
        hiding += [
            Place(kind, name, f"the class attribute {kind.__name__}.{name}")
            for kind in self._own_classes
            for name in self._asked
            if name not in self._hidden
            and not _is_trusted_class(kind)
            and not any(name in vars(each) for each in self._own_classes)
        ]
        return list(self._places.values()) + [
            each for each in hiding if (id(each.holder), each.name) not in self._places
        ]

    def _note_mentions(self, *names: Any) -> None:
        for name in names:
            self.mentions |= {
                each for each in _MENTIONED if isinstance(name, str) and f"{name}.".startswith(f"{each}.")
            }

    def _add(self, what: str, *values: Any) -> None:
        self._todo += [(value, what, None) for value in values]

    def _add_place(self, holder: Any, name: str, what: str) -> None:
        place = Place(holder, name, what)
        self._todo.append((place.read(), what, place))

    def _read(self, name: str) -> None:
        """Note that the code reads an attribute of this name, and look it up in all that was met so far."""
        if name not in self._names:
            self._names[name] = None
            if name in ("distributed", "compile"):
                self.mentions.add(f"torch.{name}")
            if name == "param_names":
                self.mentions.add(name)
            if name in _STATES_OF_GENERATORS:
                self._add(f"a state of a random number generator ({name})", _UNKNOWN)
            if name in _READ_FILES:
                self._add(f"files ({name})", _UNKNOWN)
            if name == "_version":
                self._add("the versions of tensors (_version), which deferred updates do not raise alike", _UNKNOWN)
            for holder in self._holders.values():
                self._look_up(holder, name)

    def _meet(self, holder: Any) -> None:
        if id(holder) not in self._holders:
            self._holders[id(holder)] = holder
            for name in list(vars(holder)):
                self._look_up(holder, name)

    def _record(self, record: Any, what: str) -> None:
        """Follow all attributes of an object, also those that may come to hide those of its class."""
        if id(record) not in self._records:
            self._records[id(record)] = record
            of_class = [name for kind in type(record).__mro__ for name in vars(kind) if not name.startswith("__")]
            for name in dict.fromkeys([*vars(record), *of_class]):
                self._add_place(record, name, f"{_shortened(what)}.{name}")

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
            if isinstance(holder, enum.EnumType):
                self._add(what, value)
            else:
                self._add_place(holder, name, what)

    def _function(self, function: FunctionType) -> None:
        if function in self._functions:
            return
        self._functions.add(function)
        # Not by `__module__`, which `functools.wraps` copies.
        if _is_trusted(function.__globals__.get("__name__")):
            self._add(f"a function that {function.__name__}() calls", *_wrapped(function))
            return
        self._meet(function)
        for name in ("__defaults__", "__kwdefaults__"):
            defaults, what = getattr(function, name) or (), f"a default argument of {function.__name__}()"
            if is_fixed(defaults):
                self._add(what, defaults)
            else:
                self._add_place(function, name, what)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add_place(cell, name, f"{name} of an enclosing function")
        for code in with_inner(function.__code__):
            self._code(code, function.__globals__)

    def _code(self, code: CodeType, variables: dict[str, Any]) -> None:
        for lookup, name in lookups(code):
            if name in _STATES_OF_GROUPS:
                self._add(f"a state of a process group ({name})", _UNKNOWN)
            if lookup is Lookup.GLOBAL:
                self._global(name, variables)
            elif lookup is Lookup.ATTRIBUTE:
                self._read(name)
            else:
                self._note_mentions(name)
                if not _is_trusted(name) or name in _MODULES_OF_FILES:
                    self._add(f"the module {name} (imported while it runs)", _UNKNOWN)
        for text in _texts(code.co_consts):
            self._read(text)
            if not {"getattr", "hasattr"}.isdisjoint(code.co_names) and text.isidentifier():
                self._asked[text] = None

    def _global(self, name: str, variables: dict[str, Any]) -> None:
        value, what = variables.get(name, getattr(builtins, name, None)), f"the global variable {name}"
        if name.startswith("_") and isinstance(value, (dict, list, set)) and not _is_script(variables):
            self._private.append((name, variables))
        elif name in variables:
            self._add_place(variables, name, what)
        else:
            self._add(what, value)

    def _shared_private_variables(self) -> Iterator[str]:
        """Private variables that are also used by functions of their module which ``step()`` does not run."""
        reached = {code for function in self._functions for code in with_inner(function.__code__)}
        for name, variables in self._private:
            if any(name in code.co_names for code in set(_codes_of_module(variables)) - reached):
                if is_plain(variables[name]):
                    self._places[id(variables), name] = Place(variables, name, f"the global variable {name}")
                else:
                    yield f"the global variable {name}"


def _functions_given_to(optimizer: Optimizer) -> Iterator[Any]:
    """Functions and classes in its attributes, its param groups and the attributes of its parameters."""
    given: list[Any] = list(attributes_of(optimizer).values())
    for group in optimizer.param_groups:
        given += [value for name, value in group.items() if name != "params"]
        given += [vars(parameter) for parameter in group["params"]]
    for value in walk(given, _but_hooks):
        if is_record(value):
            yield type(value)
        elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            yield value


def _but_hooks(value: Any) -> Collection[Any]:
    return () if isinstance(value, OrderedDict) else parts_of(value)  # hooks, which an update does not run


def _codes_of_module(variables: dict[str, Any]) -> Iterator[CodeType]:
    """The code of all functions that use these globals."""
    for each in gc.get_referrers(variables):
        if type(each) is FunctionType:  # not by `isinstance()`, which would trigger objects that are loaded lazily
            yield from with_inner(each.__code__)


def _is_script(variables: dict[str, Any]) -> bool:
    """Whether more than the functions of this module may change its globals: lines that still run, or ``globals()``."""
    frames: Iterable[FrameType | None] = frames_of_threads().values()
    while frames := [frame for frame in frames if frame is not None]:
        if any(frame.f_globals is variables and frame.f_code.co_name == "<module>" for frame in frames):
            return True
        frames = [frame.f_back for frame in frames]
    is_main = variables.get("__name__") == "__main__"
    return is_main or any("globals" in code.co_names for code in _codes_of_module(variables))


def _shortened(what: str) -> str:
    """What to call a place. In a long chain of objects, names would be as long as the chain."""
    return what if len(what) <= _LONGEST_NAME else f"{what[:_LONGEST_NAME]}..."


def _is_trusted(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _TRUSTED


def _is_trusted_class(kind: type) -> bool:
    """Whether a trusted module defines this class.

    ``__module__`` is not enough: ``exec()`` and ``types.new_class()`` may give it a trusted name for a user's class.
    """
    return _is_trusted(kind.__module__) and (
        is_of_c(kind) or getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    )


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


def _parts(value: Any) -> Iterable[Any] | None:
    """Other values that using this value may read; None if it may change."""
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
