"""A digest of what a data set and a transform make of samples: their settings, their code and the files they name.

The user's own code counts with its instructions, what is installed or built in with name and version. A file that is
named by a path counts with its size and the time of its last change, since reading them all would take as long as
training on them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import logging
import mmap
import os
import random
import re
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

from ddp_crossover.cpython import Lookup, is_of_c, lookups, with_inner

# Network disks answer one question slowly and many at once fast.
_THREADS = 32
_MANY_FILES = 256
_LONGEST_NAME = 256


_SIMPLE: tuple[Any, ...] = (tuple, list, dict, str, int, float)


class NoFingerprint(Exception):
    """Something has no digest; the message names it."""


def fingerprint(*values: Any) -> str:
    """The same text in all processes, as long as nothing changes that decides about samples. Raises NoFingerprint."""
    writer = _Writer()
    text = writer.text(list(values))
    files = "".join(_of_files(writer.paths))
    return hashlib.sha256(f"{text}{files}".encode(errors="surrogatepass")).hexdigest()


class _Writer:
    """Writes values as JSON that differs wherever values do: `(0, 1)` from `[0, 1]`, `{1: 2}` from `{"1": 2}`."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        # Values that have been written, by id; kept, so that no other value gets the id of one of them.
        self._written: dict[int, tuple[int, Any]] = {}

    def text(self, value: Any) -> str:
        return json.dumps(self._plain(value))

    def _plain(self, value: Any) -> Any:
        """The value in lists, texts and numbers. Notes the texts that may be paths of files."""
        kind = type(value)
        if kind is str:
            self._note_path(value)
            return value
        if value is None or kind in (bool, int, float):
            return value
        if kind is list:
            return [self._plain(one) for one in value]
        if kind is tuple:
            return {"tuple": [self._plain(one) for one in value]}
        if kind is dict:
            return {"dict": [[self._plain(key), self._plain(one)] for key, one in value.items()]}
        return self._describe(value)

    def _note_path(self, text: str) -> None:
        if os.sep in text or (len(text) < _LONGEST_NAME and os.path.splitext(text)[1]):
            self.paths.append(text)

    def _describe(self, value: Any) -> Any:
        if id(value) in self._written:
            return {"again": self._written[id(value)][0]}
        self._written[id(value)] = (len(self._written), value)
        parts = self.text(self._parts(value))
        return {type(value).__qualname__: hashlib.sha256(parts.encode(errors="surrogatepass")).hexdigest()}

    def _parts(self, value: Any) -> Any:
        """What a value is made of, in terms that are known already or simpler ones."""
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            if isinstance(value, bytes) and len(value) < _LONGEST_NAME:
                self._note_path(os.fsdecode(value))
            return hashlib.sha256(value).hexdigest()
        if isinstance(value, re.Pattern):
            return [value.pattern, value.flags]
        if isinstance(value, random.Random):
            if value is random.random.__self__:  # type: ignore[attr-defined]  # draws from it are found when made
                return "random"
            raise NoFingerprint(_class_of(value))
        if isinstance(value, (set, frozenset)):
            return sorted(self.text(item) for item in value)
        if (
            value is ...
            or value is NotImplemented
            or isinstance(value, (range, slice, complex, np.dtype, torch.dtype, torch.device, torch.Size))
        ):
            return repr(value)
        if isinstance(value, np.memmap) and (mapping := _mapping(value)) is not None:
            begin = np.frombuffer(mapping, np.uint8).ctypes.data  # a slice has its parent's offset
            place = [value.offset, value.ctypes.data - begin, list(value.shape), list(value.strides)]
            return [str(value.filename), value.dtype.str, place]
        if isinstance(value, np.ufunc):
            name = str(getattr(value, "__name__", None))
            if getattr(np, name, None) is not value:
                raise NoFingerprint(f"numpy.frompyfunc's {name}")
            return ["numpy", np.__version__, name]
        if isinstance(value, logging.Logger):
            return value.name
        if isinstance(value, np.ma.MaskedArray):
            return [np.asarray(value.data), np.ma.getmaskarray(value), value.fill_value]
        if isinstance(value, (np.ndarray, np.generic)):
            return [*self._array(np.asarray(value)), *_of_subclass(value, np.ndarray)]
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise NoFingerprint(f"a tensor of layout {value.layout}")
            plain = value.detach().as_subclass(torch.Tensor)
            flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            data = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest() if flat.numel() else ""
            return [str(value.dtype), list(value.shape), data, *_of_subclass(value, torch.Tensor)]
        if isinstance(value, types.ModuleType):
            if _is_installed(value.__name__):
                return _name_and_version(value.__name__)
            raise NoFingerprint(f"the module {value.__name__} as an object")
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
        for kind in _SIMPLE:
            if isinstance(value, kind) and type(value) is not kind:
                return [type(value), kind(value), getattr(value, "__dict__", {})]
        return self._object(value)

    def _array(self, array: np.ndarray) -> list[Any]:
        if array.dtype.hasobject:
            return [list(array.shape), array.tolist()]
        if array.dtype.kind in "US":
            for text in array.ravel().tolist():
                self._note_path(os.fsdecode(text))
        return [array.dtype.str, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]

    def _object(self, value: Any) -> Any:
        """An object of a Python class: its class and its attributes."""
        kind = type(value)
        slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(value, name)]
        if is_of_c(kind) or (not hasattr(value, "__dict__") and not slots):
            raise NoFingerprint(_class_of(value))
        return [kind, getattr(value, "__dict__", {}), {name: getattr(value, name) for name in slots}]

    def _class(self, kind: type) -> Any:
        if _is_installed(kind.__module__):
            return [*_name_and_version(kind.__module__), kind.__qualname__]
        members = {name: _unwrapped(member) for name, member in vars(kind).items() if _is_own(name, member)}
        return [kind.__qualname__, list(kind.__bases__), members]

    def _function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        closure: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not set yet
                closure[name] = cell.cell_contents
        settings = [function.__defaults__, function.__kwdefaults__, closure, function.__dict__]
        # `functools.wraps` copies the name of another function's module.
        module = function.__globals__.get("__name__", function.__module__)
        if _is_installed(module):
            return [*_name_and_version(module), code.co_qualname, settings]
        names = _names(code)
        globals_used = sorted(_looked_up(code, Lookup.GLOBAL))
        used = {name: function.__globals__[name] for name in globals_used if name in function.__globals__}
        imports = sorted(_looked_up(code, Lookup.MODULE) - {""})  # without a name if relative
        used |= {name: imported for name in imports if (imported := _module(name)) is not None}
        for name, value in used.items():
            if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
                used[name] = _used_of(value, names, set())
        return [_code(code), settings, used]


def _used_of(module: types.ModuleType, names: set[str], seen: set[str]) -> dict[str, Any]:
    """What code with these names may use of a module of the user's, and of modules in it."""
    seen.add(module.__name__)
    used: dict[str, Any] = {}
    for name in sorted(names & vars(module).keys()):
        value = vars(module)[name]
        if not isinstance(value, types.ModuleType) or _is_installed(value.__name__):
            used[name] = value
        elif value.__name__ not in seen:
            used[name] = _used_of(value, names, seen)
    return used


def _module(name: str) -> types.ModuleType | None:
    """A module that a function imports when it runs; None for what is installed, or is not there."""
    if _is_installed(name):
        return None
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file that an array looks into."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _of_subclass(value: Any, base: type) -> list[Any]:
    """What a subclass of tensors or arrays adds."""
    kind = type(value)
    if kind is base or kind.__module__.partition(".")[0] in ("torch", "numpy"):
        return []
    return [kind, getattr(value, "__dict__", {})]


def _code(code: types.CodeType) -> list[Any]:
    """Instructions, names and constants; not the lines, which comments move."""
    constants = [_code(const) if isinstance(const, types.CodeType) else const for const in code.co_consts]
    return [sys.version_info[:2], code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants]


def _looked_up(code: types.CodeType, where: Lookup) -> set[str]:
    return {name for one in with_inner(code) for lookup, name in lookups(one) if lookup is where}


def _names(code: types.CodeType) -> set[str]:
    return {name for one in with_inner(code) for name in one.co_names}


def _is_own(name: str, member: Any) -> bool:
    """Whether a member of a class is the user's: Python's own ones, with two underscores, are if they are functions."""
    is_special = (name.startswith("__") and name.endswith("__")) or name == "_abc_impl"
    wrappers = (functools._lru_cache_wrapper, functools.partial)
    return not is_special or isinstance(member, (types.FunctionType, staticmethod, classmethod, *wrappers))


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
    if type(member).__name__ == "_tuplegetter":  # a field of a NamedTuple, whose names are in `_fields`
        return None
    return member


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    is_private = [name.startswith("__") and not name.endswith("__") for name in names]
    prefix = f"_{kind.__name__.lstrip('_')}"
    return [f"{prefix}{name}" if private else name for name, private in zip(names, is_private, strict=True)]


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module is part of Python or lies where packages are installed: a version then stands for its code."""
    top = (module or "").partition(".")[0]
    of_modules = (getattr(sys.modules.get(name), "__file__", None) for name in (module or "", top))
    file = next(filter(None, of_modules), None)
    if file is None:
        return top in sys.stdlib_module_names and top != "__main__"
    places = {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
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
