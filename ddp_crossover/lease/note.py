"""A client's note: memory that it shares with the broker alone, in which it says that it has handed over.

A message would wake the broker, which then competes with the next client for the cores of a busy host. The broker looks
at notes before it handles anything else, and every 20 ms while a job waits. It believes nothing of them that it has not
promised itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import NamedTuple

_NOTE_BYTES = 4096
_FENCE, _SUCCESSOR, _AT_NS = range(3)


class Note(NamedTuple):
    """The hold under ``fence`` was handed over under the fence ``successor``, at ``at_s`` by the clock of the host."""

    fence: int
    successor: int
    at_s: float


class NoteReader:
    """The broker's side. The client receives ``fd`` and cannot change its size; the caller closes it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ddp_crossover-note", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, _NOTE_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._words = memoryview(mmap.mmap(self.fd, _NOTE_BYTES, prot=mmap.PROT_READ)).cast("Q")
        except BaseException:
            os.close(self.fd)
            raise

    def read(self) -> Note:
        """What the client has written last."""
        words = self._words
        fence = words[_FENCE]
        return Note(fence, words[_SUCCESSOR], words[_AT_NS] / 1e9)


class NoteWriter:
    """The client's side. The caller closes ``fd``."""

    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size < _NOTE_BYTES:
            raise ValueError("the note is too short")
        self._words = memoryview(mmap.mmap(fd, _NOTE_BYTES)).cast("Q")

    def write(self, fence: int, successor: int, at_ns: int) -> None:
        """Say that the hold under ``fence`` was handed over. The fence comes last: the broker looks at it first."""
        words = self._words
        words[_AT_NS] = at_ns
        words[_SUCCESSOR] = successor
        words[_FENCE] = fence
