"""How far a filler's host may run ahead of its GPU: no further than it may take to give the GPU back.

Pure: it is given the events, and so knows neither torch nor a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.cuda import Event

_BETWEEN_TURNS = object()


class _Segment(NamedTuple):
    """What was queued between two hooks."""

    point: Hashable
    end: Event
    expected_s: float


class RunAhead:
    """Bounds the device time that is queued at hooks.

    How long the work between two hooks takes is known from the last time. What has not been measured counts as the
    limit, so a first pass goes one segment at a time. A segment that takes longer than the limit is waited for: work
    cannot be taken back, so the bound is the limit or the longest segment, whichever is more.

    Args:
        limit_s: device time that may be queued when :meth:`mark` returns.
        new_event: makes an event, which must measure time, and wait without the GIL.
    """

    def __init__(self, limit_s: float, new_event: Callable[[], Event]) -> None:
        self._limit_s = limit_s
        self._new_event = new_event
        self._took_s: dict[Hashable, float] = {}
        self._queued: deque[_Segment] = deque()
        self._queued_s = 0.0
        self._start: Event | None = None  # where the oldest of them began

    def restart(self) -> None:
        """Measure from here: what the device does before, until it gets here, is another job's or nothing."""
        self._queue(_BETWEEN_TURNS, 0.0)

    def mark(self, point: Hashable) -> None:
        """At the hook ``point``: wait until what is queued may be queued."""
        self._queue(point, self._took_s.get(point, self._limit_s))

    def _queue(self, point: Hashable, expected_s: float) -> None:
        event = self._new_event()
        event.record()
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
