"""Tells whether each other thread has left the operator that it may have been in when parameters were armed.

Between looking up ``__torch_function__`` of a plain parameter and reading its memory, an operator runs without the
interpreter's lock. A cover that is put there just then would be an error in a valid program. A look-up after arming
applies the update, so it is enough to see each thread once, after that, where it is in no such operator:

* it waits in a function of the standard library, or sleeps in the kernel;
* or it has gone on in its Python code, and so has left what it was in.
"""

from __future__ import annotations

import concurrent.futures.thread
import platform
import re
import selectors
import sys
import threading
import time
from types import CodeType
from typing import Final, NamedTuple

from ddp_crossover.cpython import frames_of_threads
from ddp_crossover.own_threads import is_own

# Threads that use no parameters: ours, those of data loaders (`multiprocessing` and pinning), tqdm and tensorboard.
_NAMES = ("ddp_crossover-", "QueueFeederThread")
_TARGETS = ("(_pin_memory_loop)",)
_LIBRARIES = ("tqdm", "tensorboard")

# A thread that waits for the interpreter's lock, maybe inside of an operator, wakes up every 5 ms.
_LONG_NS = 10_000_000
_PATIENCE_S = 1e-3
_PATIENCE_WITH_A_NEW_ONE_S = 1.5e-2
_PAUSE_S = 5e-5
# Calls of the kernel in which no operator waits: nanosleep, poll, select and epoll_wait, in their variants.
_IDLE_CALLS: Final = {
    "x86_64": frozenset(("7", "23", "35", "230", "232", "270", "271", "281")),
    "aarch64": frozenset(("22", "72", "73", "101", "115")),
}.get(platform.machine(), frozenset())
_HAS_THREAD_CLOCKS: Final = sys.platform == "linux"


def _codes_of_waits() -> frozenset[CodeType]:
    """Functions of the standard library that call nothing but what waits. It has others, which call what they got."""
    waits = [
        threading.Condition.wait,
        getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join),  # it has gone in Python 3.13
        getattr(concurrent.futures.thread, "_worker", None),
        *(getattr(getattr(selectors, name, None), "select", None) for name in selectors.__dict__),
    ]
    return frozenset(code for wait in waits if isinstance(code := getattr(wait, "__code__", None), CodeType))


_WAITS: Final = _codes_of_waits()


class _Place(NamedTuple):
    """Where a thread is in its Python code."""

    code: CodeType
    instruction: int


class _Rest(NamedTuple):
    """A thread that has not run since.

    Attributes:
        native_id: the kernel's number of the thread. Python's numbers are used again more often.
        cpu_ns: processor time that it has used up to then.
        since_ns: when that was seen first.
        is_sound: whether it was seen asleep, outside of any operator, after this much processor time.
    """

    native_id: int
    cpu_ns: int
    since_ns: int
    is_sound: bool


class OtherThreads:
    """The threads of this process but the calling one."""

    def __init__(self) -> None:
        self._rests: dict[int, _Rest] = {}
        self._saw_a_new_one = False

    def find_straggler(self) -> str | None:
        """Wait until each has left the operator that it was in; the name of one that has not, or None.

        It waits for up to 1 ms, and 15 ms when it sees a thread for the first time.
        """
        self._saw_a_new_one = False
        if not (left := self._unsettled()):
            return None
        deadline_s = time.perf_counter() + (_PATIENCE_WITH_A_NEW_ONE_S if self._saw_a_new_one else _PATIENCE_S)
        while time.perf_counter() < deadline_s:
            time.sleep(_PAUSE_S)
            now = self._unsettled()
            left = {ident: place for ident, place in left.items() if now.get(ident) == place}
            if not left:
                return None
        return _name(next(iter(left)))

    def _unsettled(self) -> dict[int, _Place]:
        """The threads that may be in an operator, and where."""
        this = threading.get_ident()
        places = {
            ident: _Place(frame.f_code, frame.f_lasti)
            for ident, frame in frames_of_threads().items()
            if ident != this and frame.f_code not in _WAITS and not is_own(ident)
        }
        return {ident: place for ident, place in places.items() if not self._is_settled(ident)}

    def _is_settled(self, ident: int) -> bool:
        rest = self._rests.get(ident)
        if rest is not None and rest.is_sound and _cpu_ns(rest.native_id) == rest.cpu_ns:
            return True
        thread = _thread(ident)
        return thread is not None and (_uses_no_parameters(thread) or self._is_at_rest(ident, thread.native_id))

    def _is_at_rest(self, ident: int, native_id: int | None) -> bool:
        cpu_ns, now_ns = _cpu_ns(native_id), time.monotonic_ns()
        if cpu_ns is None or native_id is None:
            return False
        rest = self._rests.get(ident)
        if rest is None or rest.native_id != native_id:
            self._saw_a_new_one, rest = True, None
        if rest is None or rest.cpu_ns != cpu_ns:
            rest = _Rest(native_id, cpu_ns, now_ns, is_sound=False)
        call = _kernel_call(native_id)
        is_sound = call in _IDLE_CALLS or (call is not None and now_ns - rest.since_ns >= _LONG_NS)
        self._rests[ident] = rest = rest._replace(is_sound=is_sound and _cpu_ns(native_id) == cpu_ns)
        return rest.is_sound


def _thread(ident: int) -> threading.Thread | None:
    # Not `enumerate()`, which takes a lock: a signal handler may have interrupted this thread where it holds it.
    found = threading._active.get(ident)  # type: ignore[attr-defined]
    return found if isinstance(found, threading.Thread) else None


def _name(ident: int) -> str:
    """The thread's name, without the numbers that Python counts threads with."""
    thread = _thread(ident)
    return "of C" if thread is None else re.sub(r"\d+", "*", thread.name)


def _uses_no_parameters(thread: threading.Thread) -> bool:
    return (
        thread.name.startswith(_NAMES)
        or thread.name.endswith(_TARGETS)
        or type(thread).__module__.partition(".")[0] in _LIBRARIES
    )


def _cpu_ns(native_id: int | None) -> int | None:
    """Processor time of a thread; None if it has ended, or where the system does not tell."""
    if native_id is None or not _HAS_THREAD_CLOCKS:
        return None
    # The clock that `pthread_getcpuclockid` returns, which must not be asked about a thread that has ended.
    clock = (~native_id << 3) | 6
    try:
        return time.clock_gettime_ns(clock)
    except OSError:
        return None


def _kernel_call(native_id: int) -> str | None:
    """Number of the call of the kernel in which a thread sleeps; None if it runs, or cannot be looked at."""
    try:
        with open(f"/proc/self/task/{native_id}/syscall", encoding="ascii") as file:
            call = file.read().split(maxsplit=1)[0]
    except (OSError, IndexError):
        return None
    return None if call == "running" else call
