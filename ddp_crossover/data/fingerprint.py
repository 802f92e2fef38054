"""A digest of what a data set and a transform make of samples: their settings, their code and the files they name.

The user's own code counts with its instructions, what is installed or built in with name and version. A file that is
named by a path counts with its size and the time of its last change, since reading them all would take as long as
training on them.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

# Network disks answer one question slowly and many at once fast.
_THREADS = 32
_MANY_FILES = 256
_LONGEST_NAME = 256


class NoFingerprint(Exception):
    """Something has no digest; the message names it."""


def fingerprint(*values: Any) -> str:
    """The same text in all processes, as long as nothing changes that decides about samples. Raises NoFingerprint."""
    writer = _Writer()
    text = writer.text(list(values))
    files = "".join(_of_files(writer.paths))
    return hashlib.sha256(f"{text}{files}".encode(errors="surrogatepass")).hexdigest()


class _Writer:
    """Writes values as JSON, whose encoder does the long lists, and asks for each value that JSON does not have."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        # Values that have been written, by id; kept, so that no other value gets the id of one of them.
        self._written: dict[int, tuple[int, Any]] = {}

    def text(self, value: Any) -> str:
        self._find_paths(value)
        before = dict(self._written)
        try:
            return json.dumps(value, default=self._describe)
        except TypeError:  # a key that is no text
            self._written = before  # what has been written is thrown away
            return json.dumps(_with_text_keys(value, self), default=self._describe)

    def _find_paths(self, value: Any) -> None:
        """Note the texts in nested lists and dicts that may be paths of files."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                if os.sep in one or (len(one) < _LONGEST_NAME and os.path.splitext(one)[1]):
                    self.paths.append(one)
            elif isinstance(one, (list, tuple)):
                waiting.extend(one)
            elif isinstance(one, dict):
                waiting.extend(one.values())

    def _describe(self, value: Any) -> Any:
        if id(value) in self._written:
            return {"again": self._written[id(value)][0]}
        self._written[id(value)] = (len(self._written), value)
        return [type(value).__qualname__, hashlib.sha256(self.text(self._parts(value)).encode()).hexdigest()]

    def _parts(self, value: Any) -> Any:
        """What a value is made of, in terms that are known already or simpler ones."""
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return hashlib.sha256(value).hexdigest()
        if isinstance(value, (set, frozenset)):
            return sorted(self.text(item) for item in value)
        if (
            value is ...
            or value is NotImplemented
            or isinstance(value, (range, slice, complex, np.dtype, torch.dtype, torch.device, torch.Size))
        ):
            return repr(value)
        if isinstance(value, np.memmap):
            return [str(value.filename), value.offset, value.dtype.str, list(value.shape)]
        if isinstance(value, np.ufunc):
            return ["numpy", np.__version__, value.__name__]
        if isinstance(value, logging.Logger):
            return value.name
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(np.asarray(value))
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise NoFingerprint(f"a tensor of layout {value.layout}")
            flat = value.detach().cpu().contiguous().reshape(-1)
            return [str(value.dtype), list(value.shape), self._array(flat.view(torch.uint8).numpy())]
        if isinstance(value, types.ModuleType):
            return _name_and_version(value.__name__)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools._lru_cache_wrapper):
            return value.__wrapped__
        if isinstance(value, types.MethodDescriptorType):
            return [value.__objclass__, value.__name__]
        if isinstance(value, types.BuiltinFunctionType) and isinstance(
            value.__self__, (types.ModuleType, type, type(None))
        ):
            return [*_name_and_version(value.__module__ or "builtins"), value.__qualname__]
        if isinstance(value, enum.Enum):
            return [type(value), value.name]
        return self._object(value)

    def _array(self, array: np.ndarray) -> Any:
        if array.dtype.hasobject:
            return [list(array.shape), array.tolist()]
        return [array.dtype.str, list(array.shape), hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()]

    def _object(self, value: Any) -> Any:
        """An object of a Python class: its class and its attributes."""
        kind = type(value)
        slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(value, name)]
        if _is_native(kind) or (not hasattr(value, "__dict__") and not slots):
            raise NoFingerprint(_class_of(value))
        return [kind, getattr(value, "__dict__", {}), {name: getattr(value, name) for name in slots}]

    def _class(self, kind: type) -> Any:
        if _is_installed(kind.__module__):
            return [*_name_and_version(kind.__module__), kind.__qualname__]
        members = {name: _unwrapped(member) for name, member in vars(kind).items() if _is_own(name, member)}
        return [kind.__qualname__, list(kind.__bases__), members]

    def _function(self, function: types.FunctionType) -> Any:
        if _is_installed(function.__module__):
            return [*_name_and_version(function.__module__), function.__qualname__]
        code = function.__code__
        named = {name: function.__globals__[name] for name in sorted(_globals(code)) if name in function.__globals__}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not set yet
                named[name] = cell.cell_contents
        return [_code(code), function.__defaults__, function.__kwdefaults__, named]


def _with_text_keys(value: Any, writer: _Writer) -> Any:
    if isinstance(value, dict):
        return [[writer.text(key), _with_text_keys(item, writer)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_with_text_keys(item, writer) for item in value]
    return value


def _code(code: types.CodeType) -> list[Any]:
    """Instructions, names and constants; not the lines, which comments move."""
    constants = [_code(const) if isinstance(const, types.CodeType) else const for const in code.co_consts]
    return [sys.version_info[:2], code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants]


def _globals(code: types.CodeType) -> set[str]:
    """Names of the global functions, classes, modules and constants that code uses."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return own.union(*(_globals(one) for one in inner))


def _is_own(name: str, member: Any) -> bool:
    """Whether a member of a class is the user's: Python's own ones, with two underscores, are if they are functions."""
    is_special = (name.startswith("__") and name.endswith("__")) or name == "_abc_impl"
    return not is_special or isinstance(member, (types.FunctionType, staticmethod, classmethod))


def _unwrapped(member: Any) -> Any:
    """The functions in what a class holds of them."""
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    if isinstance(member, property):
        return [member.fget, member.fset]
    if isinstance(member, functools.cached_property):
        return member.func
    if inspect.ismemberdescriptor(member) or inspect.isgetsetdescriptor(member):
        return None
    return member


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _is_native(kind: type) -> bool:
    """Whether objects keep state that Python does not see, as generators of random numbers and files do."""
    return not kind.__flags__ & (1 << 9)  # Py_TPFLAGS_HEAPTYPE: made by a class statement


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module is part of Python or lies where packages are installed: a version then stands for its code."""
    top = (module or "").partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return True
    of_modules = (getattr(sys.modules.get(name), "__file__", None) for name in (module or "", top))
    file = next(filter(None, of_modules), None)
    if file is None:
        return False
    places = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
    return any(os.path.realpath(file).startswith(os.path.realpath(place) + os.sep) for place in places)


def _name_and_version(module: str) -> list[Any]:
    top = module.partition(".")[0]
    version = getattr(sys.modules.get(top), "__version__", None)
    return [module, str(version) if version is not None else sys.version_info[:2]]


def _of_files(paths: list[str]) -> list[str]:
    """Size and time of last change of those paths that name files."""

    def describe(path: str) -> str:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return ""
        return f"{status.st_size} {status.st_mtime_ns};" if os.path.isfile(path) else ""

    if len(paths) < _MANY_FILES:
        return [describe(path) for path in paths]
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(describe, paths, chunksize=64))


def _class_of(value: Any) -> str:
    """A value's class, for messages."""
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}"


@functools.cache
def decoder_versions() -> dict[str, str]:
    """Versions of the installed packages that turn files into samples, and of those that transform them."""
    versions = {}
    for name in ("torch", "torchvision", "numpy", "pillow", "opencv-python", "opencv-python-headless"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
