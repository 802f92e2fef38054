"""What a device still has to do for this job, seen without waiting for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ddp_crossover import device as gpu
from ddp_crossover.collectives.leg import HostWait
from ddp_crossover.collectives.stream_order import CudaStreams

# A stream that stands at a leg for longer may do so until another job has had its turn: the leg may need a peer that
# waits for one. Before that, what is queued behind the leg goes on by itself at any moment.
_STANDS_S = 2e-3
# Nothing is done between two polls of a wait outside of turns.
_POLL_S = 1.0


class _OpenWait(NamedTuple):
    """A wait that was queued: `before` happens when the stream gets to it, `done` when the leg has ended."""

    before: gpu.Event
    done: gpu.Event


class Backlog:
    """Looks at events of the compute stream; blocks nowhere.

    A stream stands still at the oldest wait whose leg has not ended, once it has got there.

    Args:
        streams: the streams of the device.
    """

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._waits: deque[_OpenWait] = deque()
        self._standing: _OpenWait | None = None
        self._standing_since_s = 0.0
        self._lock = threading.RLock()  # reentrant: a signal handler may wait for legs

    def wait_begins(self, done: gpu.Event) -> None:
        """Note that the current stream is going to wait for ``done``."""
        wait = _OpenWait(gpu.record(self._streams.current()), done)
        with self._lock:
            self._waits.append(wait)
            self._drop_ended()

    def stands_at_last_wait(self) -> bool:
        """Whether the device waits for a leg, and no other wait is queued behind that."""
        with self._lock:
            self._drop_ended()
            return len(self._waits) == 1 and bool(self._waits[0].before.query())

    def stands_for_long(self) -> bool:
        """Whether the device has been seen waiting for one leg for 2 ms, whatever is queued behind it."""
        now_s = time.perf_counter()
        with self._lock:
            self._drop_ended()
            oldest = self._waits[0] if self._waits and self._waits[0].before.query() else None
            if oldest is not self._standing:
                self._standing, self._standing_since_s = oldest, now_s
            return oldest is not None and now_s - self._standing_since_s >= _STANDS_S

    def end(self) -> Callable[[], bool]:
        """A function for any thread: whether the device has done what is queued now, or stands still before that.

        If it waits for a leg for long, the turn must end, too, see :data:`_STANDS_S`.
        """
        try:
            last = gpu.record(self._streams.current())
        except RuntimeError:  # of an earlier kernel: CUDA raises it again in the job's own next call
            return lambda: True

        def is_drained() -> bool:
            try:
                return last.query() or self.stands_for_long()
            except RuntimeError:
                return True

        return is_drained

    def outside_of_turn(self) -> HostWait:
        """For waits between turns: they are noted, and nothing is given away."""
        return _WaitOutsideOfTurn(self)

    def _drop_ended(self) -> None:
        while self._waits and (oldest := self._waits[0]).done.query():
            if self._waits and self._waits[0] is oldest:  # else a signal handler has dropped it meanwhile
                self._waits.popleft()


class _WaitOutsideOfTurn:
    """A ``HostWait`` that only notes what the stream waits for: the next turn is queued behind it."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog

    def poll(self) -> float:
        return _POLL_S

    def before_stream_waits(self, done: gpu.Event) -> None:
        self._backlog.wait_begins(done)
