"""Limits how far a filler's host runs ahead of its GPU, so that the filler can give the GPU back soon.

Pure: callers pass in the events, so this module needs neither torch nor a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ddp_crossover.device import Event

_BETWEEN_TURNS = object()


class _Segment(NamedTuple):
    """The device work queued between two hooks."""

    point: Hashable
    end: Event
    expected_s: float


class RunAhead:
    """Bounds the device time that is queued when a hook returns.

    The work between two hooks (a segment) is expected to take as long as last time. An unmeasured segment counts as the
    limit, so the first pass runs one segment at a time. If a segment takes longer than the limit, the host waits for
    it. Queued work cannot be withdrawn, so the bound is the limit or the longest segment, whichever is longer.

    Args:
        limit_s: seconds of device time that may be queued when :meth:`mark` returns.
        record: a new event at the end of what is queued now. It must measure time, and release the GIL while the host
            waits for it.
    """

    def __init__(self, limit_s: float, record: Callable[[], Event]) -> None:
        self._limit_s = limit_s
        self._record = record
        self._took_s: dict[Hashable, float] = {}
        self._queued: deque[_Segment] = deque()
        self._queued_s = 0.0
        self._start: Event | None = None  # start of the oldest queued segment

    def restart(self) -> None:
        """Start measuring here: earlier device time belonged to another job or was idle."""
        self._queue(_BETWEEN_TURNS, 0.0)

    def mark(self, point: Hashable) -> None:
        """End a segment at the hook ``point``, and wait until the expected queued time fits the limit."""
        self._queue(point, self._took_s.get(point, self._limit_s))

    def _queue(self, point: Hashable, expected_s: float) -> None:
        event = self._record()
        self._queued.append(_Segment(point, event, expected_s))
        self._queued_s += expected_s
        while self._queued and (self._queued_s > self._limit_s or self._queued[0].end.query()):
            self._retire(self._queued.popleft())

    def _retire(self, segment: _Segment) -> None:
        segment.end.synchronize()
        if self._start is not None:
            self._took_s[segment.point] = self._start.elapsed_time(segment.end) / 1e3
        self._start = segment.end
        self._queued_s -= segment.expected_s
