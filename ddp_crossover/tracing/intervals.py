"""Arithmetic of time intervals. Pure.

An interval is a pair ``(begin, end)`` and contains every moment ``begin <= t < end``; it is empty if ``end <= begin``.
A *disjoint* list is sorted and has no overlaps and no empty intervals. All lists returned from here are disjoint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

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
