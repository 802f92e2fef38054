"""Spans, of which a trace consists, and the figures computed from them by interval arithmetic. Pure.

An interval is a pair ``(begin, end)`` and contains every moment ``begin <= t < end``; it is empty if ``end <= begin``.
A *disjoint* list is sorted and has no overlaps and no empty intervals. All lists returned from here are disjoint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All moments in at least one of ``intervals``, which may overlap and be in any order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersection(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """All moments in both of two disjoint lists."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            common.append((begin, end))
        # The interval that ends first does not overlap later intervals of the other list.
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """All moments in ``left`` and not in ``right``, both disjoint lists."""
    infinity = float("inf")
    edges = [-infinity, *(edge for interval in right for edge in interval), infinity]
    return intersection(left, union(zip(edges[::2], edges[1::2], strict=True)))


def clip(intervals: list[Interval], window: Interval) -> list[Interval]:
    """The part of a disjoint list inside ``window``, in time proportional to the result (after a binary search)."""
    low = bisect_right(intervals, window[0], key=lambda interval: interval[1])
    high = bisect_right(intervals, window[1], key=lambda interval: interval[0])
    return intersection(intervals[low:high], union([window]))


def total(intervals: Iterable[Interval]) -> float:
    """The total length of a disjoint list."""
    return sum(end - begin for begin, end in intervals)


LEG_KINDS = ("scatter", "gather", "all_reduce")
COMPUTE_KINDS = ("forward", "backward", "update")
WAIT_KINDS = ("wait", "lease_wait")
LEASE_KINDS = ("held", "gap", "lease_wait")
KINDS = ("step", *COMPUTE_KINDS, "wait", *LEG_KINDS, *LEASE_KINDS)


class Span(NamedTuple):
    """One recorded activity and its time.

    Attributes:
        kind: ``step``, ``forward``, ``backward``, ``update``, ``wait``, ``scatter``, ``gather`` or ``all_reduce``. A
            step goes from the first forward after an ``optimizer.step()`` to the next such forward. With a lease also
            ``held``, ``gap`` (a wait in which another job had its turn) and ``lease_wait``.
        begin_s: host time in seconds (``time.perf_counter``). A leg begins when it is handed to the link.
        end_s: host time in seconds, likewise.
        group: fusion group of a leg (with plain all-reduce the bucket), or of the awaited leg for a wait; else -1.
        posted_s: host time at which a leg was posted to the network; NaN if not known, and for spans that are not legs.
        detail: for a wait, the label of what is awaited; for the lease, the job.
    """

    kind: str
    begin_s: float
    end_s: float
    group: int = -1
    posted_s: float = float("nan")
    detail: str = ""

    @property
    def interval(self) -> Interval:
        """The pair (begin, end)."""
        return self.begin_s, self.end_s

    @property
    def under_way(self) -> Interval:
        """From when a leg was posted, if known, to its end: until then it was queued and did not use the link."""
        return (self.posted_s if self.posted_s == self.posted_s else self.begin_s, self.end_s)


class Figures(NamedTuple):
    """How the time of one step, or of a whole trace, was spent; all in seconds.

    Attributes:
        begin_s: host time (``time.perf_counter``) at the beginning.
        end_s: host time at the end.
        compute_s: time of forward, backward and updates, without waits.
        communication_s: time in which at least one leg was under way.
        exposed_s: time in which at least one leg was under way and nothing was computed.
        wait_s: time in which the training thread waited for a leg.
    """

    begin_s: float
    end_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    wait_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from begin to end."""
        return self.end_s - self.begin_s


def exposed(spans: list[Span]) -> list[Interval]:
    """When at least one leg was under way and nothing was computed."""
    return difference(when(spans, LEG_KINDS), computing(spans))


def computing(spans: list[Span]) -> list[Interval]:
    """When forward, backward or an update ran and did not wait."""
    return difference(when(spans, COMPUTE_KINDS), when(spans, WAIT_KINDS))


def when(spans: list[Span], kinds: Iterable[str]) -> list[Interval]:
    """When at least one span of these kinds was under way, as a disjoint list."""
    return union(span.under_way for span in spans if span.kind in kinds)


def figures(spans: list[Span], windows: list[Interval]) -> list[Figures]:
    """The figures for each time window."""
    parts = (computing(spans), when(spans, LEG_KINDS), exposed(spans), when(spans, ("wait",)))
    return [Figures(*window, *(total(clip(part, window)) for part in parts)) for window in windows]
