"""What a link has sent, the clock that measures its legs, and what they cost the host."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator

from ddp_crossover.report.clock import CommClock

# Of each kind of call the latest times are kept.
_KEPT = 64


class HostTimes:
    """What calls cost a host that only queues work for a device."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Measure the block as one call of ``what``."""
        begin_s = time.perf_counter()
        yield
        self._seconds[what].append(time.perf_counter() - begin_s)

    def typical_s(self, what: str) -> float:
        """Lower quartile of the seconds of a call, 0 if there was none.

        The others were first calls, which load kernels and make connections, or found the device's queue full.
        """
        seconds = sorted(self._seconds[what])
        return seconds[len(seconds) // 4] if seconds else 0.0


class LinkMeter:
    """Shared by a link and all its legs.

    Attributes:
        clock: measures times of legs and waits.
        sent_bytes: payload bytes that this rank has sent so far.
        host: what legs (``"leg"``) and updates of groups (``"update"``) cost the host; not measured on CPU, where the
            host computes them.
    """

    def __init__(self) -> None:
        self.clock = CommClock()
        self.sent_bytes = 0
        self.host = HostTimes()

    def sent(self, payload_bytes: int) -> None:
        self.sent_bytes += payload_bytes

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Leave all unchanged by legs that start and end inside the block, because they are not training."""
        sent_bytes, clock, host = self.sent_bytes, self.clock, self.host
        self.clock, self.host = CommClock(), HostTimes()
        try:
            yield
        finally:
            self.sent_bytes, self.clock, self.host = sent_bytes, clock, host
