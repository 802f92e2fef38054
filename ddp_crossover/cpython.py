"""What CPython tells: the names that code looks up, without running it, which classes C defines, where threads are."""

from __future__ import annotations

import dis
import enum
import gc
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

# Of what a class statement makes; since Python 3.12 also of many classes of C, but these are immutable.
_HEAP_TYPE = 1 << 9
_IMMUTABLE_TYPE = 1 << 8


class Lookup(enum.Enum):
    """Where an instruction looks a name up."""

    GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
    MODULE = ("IMPORT_NAME",)


_LOOKUPS = {instruction: lookup for lookup in Lookup for instruction in lookup.value}


def lookups(code: CodeType) -> Iterator[tuple[Lookup, str]]:
    """Names that this code looks up, in the order of its instructions; without the code of functions inside of it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOOKUPS:
            yield _LOOKUPS[instruction.opname], instruction.argval


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """This code, and that of functions and classes inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_inner(constant)


def is_of_c(kind: type) -> bool:
    """Whether C defines this class, so that its objects may keep state that Python does not see, as files do."""
    return kind.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) != _HEAP_TYPE


def frames_of_threads() -> dict[int, FrameType]:
    """The frame that each thread is in, by the identifier of the thread.

    CPython 3.11 holds a lock of the interpreter while it makes the dict, and may collect garbage there. A finalizer in
    Python lets other threads run; one that begins or ends waits for that lock, and the process hangs. From 3.12 on no
    garbage is collected inside of a function of C.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()
