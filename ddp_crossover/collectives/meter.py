"""What a link has sent, the clock that measures its legs, and what they cost the host."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from ddp_crossover.tracing.clock import CommClock


class HostTimes:
    """What calls cost a host that only queues work for a device."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: Counter[str] = Counter()

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Measure the block as one call of ``what``."""
        begin_s = time.perf_counter()
        yield
        self._seconds[what] += time.perf_counter() - begin_s
        self._calls[what] += 1

    def mean_s(self, what: str) -> float:
        """Mean seconds of a call; 0 if there was none."""
        return self._seconds[what] / max(self._calls[what], 1)


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

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Leave both unchanged by legs that start and end inside the block, because they are not training."""
        sent_bytes, clock = self.sent_bytes, self.clock
        self.clock = CommClock()
        try:
            yield
        finally:
            self.sent_bytes, self.clock = sent_bytes, clock
