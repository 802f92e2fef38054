"""The state page: shared memory that the broker writes and every client reads without a system call.

There is one cache line per resource, with one word for each field of :class:`ResourceState`. Word 0 of the page is a
heartbeat that the broker increments while any job waits. Each word is read and written in one aligned 8-byte access. A
client may read between two writes and see an inconsistent state, which affects speed only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import zlib
from typing import NamedTuple

RESOURCE_SLOTS = 63
_WORDS = 8  # 8 words of 8 bytes fill a cache line, so two resources never share one
_FENCE, _YIELDING, _WAITERS, _PRESSED, _TIED, _HOLDER = range(6)  # in the order of ResourceState
_PAGE_BYTES = (RESOURCE_SLOTS + 1) * _WORDS * 8
_F_SEAL_FUTURE_WRITE = 0x10  # not in Python's fcntl; Linux 5.1


class ResourceState(NamedTuple):
    """The state of a resource that clients see on the page.

    Attributes:
        fence: the fence of the current hold, 0 if the resource is free.
        yielding: the fence that is asked to yield, 0 if none is.
        waiters: how many jobs wait, not counting the one that holds.
        pressed: 1 if a waiting job is entitled to a turn, else 0.
        tied: 1 if the broker may keep the resource free for another job when a job requests it, else 0.
        holder: :func:`tag_of` the job that holds, 0 if none does.
    """

    fence: int = 0
    yielding: int = 0
    waiters: int = 0
    pressed: int = 0
    tied: int = 0
    holder: int = 0


class PageWriter:
    """The broker's side. Clients receive ``fd``, and can neither write to it nor change its size."""

    def __init__(self) -> None:
        # A memfd does not count against /dev/shm, which is small and often full in containers.
        self.fd = os.memfd_create("ddp_crossover-lease", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, _PAGE_BYTES)
        self._words = memoryview(mmap.mmap(self.fd, _PAGE_BYTES)).cast("Q")
        # Our mapping stays writable; all later mappings are read-only.
        seals = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def beat(self) -> None:
        """Show that the broker is alive."""
        self._words[0] += 1

    def show(self, slot: int, state: ResourceState) -> None:
        """Write the state of the resource in ``slot``. The fence comes last: clients look at it first."""
        start = (slot + 1) * _WORDS
        for word in (_YIELDING, _WAITERS, _PRESSED, _TIED, _HOLDER, _FENCE):
            self._words[start + word] = state[word]


class PageReader:
    """A client's side: one resource's slot on the page behind ``fd``. The caller closes ``fd``."""

    def __init__(self, fd: int, slot: int) -> None:
        if not 0 <= slot < RESOURCE_SLOTS:
            raise ValueError(f"the state page has no slot {slot}")
        # Reading a mapping beyond the end of the file would raise SIGBUS.
        if os.fstat(fd).st_size < _PAGE_BYTES:
            raise ValueError("the state page is too short")
        self._words = memoryview(mmap.mmap(fd, _PAGE_BYTES, prot=mmap.PROT_READ)).cast("Q")
        self._start = (slot + 1) * _WORDS

    @property
    def beats(self) -> int:
        return self._words[0]

    @property
    def fence(self) -> int:
        return self._words[self._start]

    @property
    def yielding(self) -> int:
        return self._words[self._start + _YIELDING]

    @property
    def tied(self) -> int:
        return self._words[self._start + _TIED]

    @property
    def holder(self) -> int:
        return self._words[self._start + _HOLDER]

    @property
    def waiters(self) -> int:
        return self._words[self._start + _WAITERS]

    @property
    def pressed(self) -> int:
        return self._words[self._start + _PRESSED]

    def is_undisturbed(self, fence: int) -> bool:
        """Whether ``fence`` is the current hold and no waiting job presses it."""
        return self._words[self._start] == fence and not self._words[self._start + _PRESSED]


def tag_of(job: str) -> int:
    """Nonzero number that names a job on the page, equal on all its ranks. Collisions affect speed only."""
    return zlib.crc32(job.encode()) | 1 << 32
