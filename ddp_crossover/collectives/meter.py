"""What a link has sent, and the clock that measures its legs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ddp_crossover.tracing.clock import CommClock


class LinkMeter:
    """Shared by a link and all its legs.

    Attributes:
        clock: measures times of legs and waits.
        sent_bytes: payload bytes that this rank has sent so far.
    """

    def __init__(self) -> None:
        self.clock = CommClock()
        self.sent_bytes = 0

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Leave both unchanged by legs that start and end inside the block, because they are not training."""
        sent_bytes, clock = self.sent_bytes, self.clock
        self.clock = CommClock()
        try:
            yield
        finally:
            self.sent_bytes, self.clock = sent_bytes, clock
