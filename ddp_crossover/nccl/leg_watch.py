"""Names a leg that does not end, before NCCL's watchdog ends the process, which knows only sequence numbers."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import NamedTuple

from ddp_crossover import device as gpu
from ddp_crossover.log import logger

_POLL_S = 1.0
# A stalled leg is reported after this part of the time-out of its process group.
_REPORT_AFTER = 0.5


class _WatchedLeg(NamedTuple):
    label: str
    begun: gpu.Event
    done: gpu.Event


class LegWatch:
    """Watches the legs of one stream, from a thread that asks their events once a second.

    Args:
        rank: this rank, for the message.
        timeout_s: time-out of the process group.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._legs: deque[_WatchedLeg] = deque()
        self._lock = threading.RLock()  # reentrant: a signal handler may start legs
        self._stalled: _WatchedLeg | None = None
        self._stalled_since_s = 0.0
        self._is_reported = False
        self._closed = threading.Event()
        look = weakref.WeakMethod(self.look)
        closed = self._closed

        def run() -> None:
            while not closed.wait(_POLL_S) and (bound := look()) is not None:
                bound(time.monotonic())
                del bound

        threading.Thread(target=run, name="ddp_crossover-leg-watch", daemon=True).start()

    def add(self, label: str, begun: gpu.Event, done: gpu.Event) -> None:
        self._legs.append(_WatchedLeg(label, begun, done))
        # Two of them for each new one, so that few are left: most have ended by now.
        for _ in range(2):
            self._drop_if_done()

    def close(self) -> None:
        self._closed.set()

    def look(self, now_s: float) -> None:
        """Report the leg on which the stream has stood for too long, once."""
        while self._drop_if_done():
            pass
        leg = self._oldest_begun()
        if leg is None:
            self._stalled = None
            return
        if leg is not self._stalled:
            self._stalled, self._stalled_since_s, self._is_reported = leg, now_s, False
        stood_s = now_s - self._stalled_since_s
        if stood_s >= _REPORT_AFTER * self._timeout_s and not self._is_reported:
            self._is_reported = True
            logger.error(
                f"rank {self._rank}: the {leg.label} has not ended for {stood_s:.0f} s: a peer has died, or is that "
                f"late. NCCL's watchdog ends this process after {self._timeout_s:.0f} s"
            )

    def _drop_if_done(self) -> bool:
        with self._lock:
            if not self._legs or not gpu.has_happened(self._legs[0].done, if_broken=False):
                return False
            self._legs.popleft()
            return True

    def _oldest_begun(self) -> _WatchedLeg | None:
        with self._lock:
            if not self._legs or not gpu.has_happened(self._legs[0].begun, if_broken=False):
                return None
            return self._legs[0]
