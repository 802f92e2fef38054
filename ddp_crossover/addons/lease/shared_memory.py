"""Memory that broker and clients share: the state page, and a note for each client. Reading it takes no system call.

The broker writes the *state page*, and every client reads it. There is one cache line per resource, with one word for
each field of :class:`ResourceState` but the last, which has two. Word 0 of the page is a heartbeat that the broker
increments while any job waits. Each word is read and written in one aligned 8-byte access. A client may read between
two writes and see an inconsistent state, which affects speed only.

In its *note*, which it shares with the broker alone, a client says that it has handed over. A message would wake the
broker, which then competes with the next client for the cores of a busy host. The broker looks at notes before it
handles anything else, and every 20 ms while a job waits. It believes nothing of them that it has not promised itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import zlib
from typing import NamedTuple

RESOURCE_SLOTS = 63
_WORDS = 8  # 8 words of 8 bytes fill a cache line, so two resources never share one
_FENCE, _YIELDING, _WAITERS, _PRESSED, _TIED, _HOLDER, _NEXT, _TICKET = range(_WORDS)  # in the order of ResourceState
_EVEN_IF_AGAIN = 1 << 63  # a ticket is this bit, a member in 31 bits and the low 32 bits of its request's number
_PAGE_BYTES = (RESOURCE_SLOTS + 1) * _WORDS * 8
_F_SEAL_FUTURE_WRITE = 0x10  # not in Python's fcntl; Linux 5.1

_NOTE_BYTES = 4096
_NOTE_FENCE, _NOTE_SUCCESSOR, _NOTE_AT_NS = range(3)


class Successor(NamedTuple):
    """The client that the broker has promised a resource, if the hold of now ends by its holder's release.

    Attributes:
        fence: the fence of the promised hold, 0 if nothing is promised.
        member: the broker's number of the client.
        request: the number of the client's request.
        even_if_again: whether the promise holds if the holder requests the resource again while it releases it.
    """

    fence: int = 0
    member: int = 0
    request: int = 0
    even_if_again: bool = False


NOBODY = Successor()


class ResourceState(NamedTuple):
    """The state of a resource that clients see on the page.

    Attributes:
        fence: the fence of the current hold, 0 if the resource is free.
        yielding: the fence that is asked to yield, 0 if none is.
        waiters: how many jobs wait, not counting the one that holds.
        pressed: 1 if a waiting job is entitled to a turn, else 0.
        tied: 1 if the broker may keep the resource free for another job when a job requests it, else 0.
        holder: :func:`tag_of` the job that holds, 0 if none does.
        successor: to whom the holder may hand the resource over.
    """

    fence: int = 0
    yielding: int = 0
    waiters: int = 0
    pressed: int = 0
    tied: int = 0
    holder: int = 0
    successor: Successor = NOBODY


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
        start = (slot + 1) * _WORDS
        words = self._words
        for word in (_YIELDING, _WAITERS, _PRESSED, _TIED, _HOLDER):
            words[start + word] = state[word]  # type: ignore[assignment]
        # The fence comes after them, because clients look at it first, and before the next promise: a fence that was
        # promised must not be missing on the page between the promise and the hold.
        words[start + _FENCE] = state.fence
        fence, member, request, even_if_again = state.successor
        if words[start + _NEXT] != fence:
            words[start + _NEXT] = 0  # no reader may see a fence with another promise's ticket
        words[start + _TICKET] = _ticket(member, request) | (_EVEN_IF_AGAIN if even_if_again else 0)
        words[start + _NEXT] = fence


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

    @property
    def promised(self) -> int:
        """The fence that was promised to follow the current hold, 0 if none."""
        return self._words[self._start + _NEXT]

    def admits(self, fence: int) -> bool:
        """Whether ``fence`` is the current hold, or the one that was promised to follow it."""
        words, start = self._words, self._start
        # Look again: the promise may have become the hold after the first look.
        return words[start] == fence or words[start + _NEXT] == fence or words[start] == fence

    def successor(self, fence: int) -> Successor:
        """Who was promised the resource after the hold under ``fence``; ``NOBODY`` also if that is not the hold now."""
        words, start = self._words, self._start
        promised = words[start + _NEXT]
        ticket = words[start + _TICKET]
        if promised <= fence or words[start + _NEXT] != promised or words[start] != fence:
            return NOBODY
        return Successor(promised, ticket >> 32 & 0x7FFFFFFF, ticket & 0xFFFFFFFF, bool(ticket & _EVEN_IF_AGAIN))

    def promises(self, fence: int, member: int, request: int) -> bool:
        """Whether ``request`` of ``member`` is promised the next hold, under ``fence``."""
        words, start = self._words, self._start
        ticket = words[start + _TICKET] & ~_EVEN_IF_AGAIN
        return words[start + _NEXT] == fence and ticket == _ticket(member, request)

    def is_undisturbed(self, fence: int) -> bool:
        """Whether ``fence`` is the current hold and no waiting job presses it."""
        return self._words[self._start] == fence and not self._words[self._start + _PRESSED]


def _ticket(member: int, request: int) -> int:
    return member << 32 | request & 0xFFFFFFFF


def tag_of(job: str) -> int:
    """Nonzero number that names a job on the page, equal on all its ranks. Collisions affect speed only."""
    return zlib.crc32(job.encode()) | 1 << 32


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
        fence = words[_NOTE_FENCE]
        return Note(fence, words[_NOTE_SUCCESSOR], words[_NOTE_AT_NS] / 1e9)


class NoteWriter:
    """The client's side. The caller closes ``fd``."""

    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size < _NOTE_BYTES:
            raise ValueError("the note is too short")
        self._words = memoryview(mmap.mmap(fd, _NOTE_BYTES)).cast("Q")

    def write(self, fence: int, successor: int, at_ns: int) -> None:
        """Say that the hold under ``fence`` was handed over. The fence comes last: the broker looks at it first."""
        words = self._words
        words[_NOTE_AT_NS] = at_ns
        words[_NOTE_SUCCESSOR] = successor
        words[_NOTE_FENCE] = fence
