"""Arithmetic of intervals against sets of whole moments."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover.report.spans import clip, difference, intersection, total, union

edge = st.integers(0, 30)
any_intervals = st.lists(st.tuples(edge, edge), max_size=8)

pytestmark = pytest.mark.quick


def moments(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for begin, end in intervals for moment in range(begin, end)}


def assert_disjoint(intervals: list[tuple[int, int]]) -> None:
    edges = [edge for interval in intervals for edge in interval]
    # No two touch either: one list of intervals for one set of moments.
    assert all(before < after for before, after in pairwise(edges))


@given(any_intervals)
def test_union_is_the_set_of_moments(intervals) -> None:
    merged = union(intervals)
    assert_disjoint(merged)
    assert moments(merged) == moments(intervals)
    assert total(merged) == len(moments(intervals))


@given(any_intervals, any_intervals)
def test_intersection_and_difference_are_those_of_sets(left, right) -> None:
    common, rest = intersection(union(left), union(right)), difference(union(left), union(right))
    for result in (common, rest):
        assert_disjoint(result)
    assert moments(common) == moments(left) & moments(right)
    assert moments(rest) == moments(left) - moments(right)


@given(any_intervals, st.tuples(edge, edge))
def test_a_clip_is_an_intersection_with_one_window(intervals, window) -> None:
    assert clip(union(intervals), window) == intersection(union(intervals), union([window]))
