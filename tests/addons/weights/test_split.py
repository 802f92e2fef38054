"""Shares of a batch: the best ones there are, whole numbers that add up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_crossover.addons.weights.split import Speed, longest_s, split

SPEEDS = st.builds(Speed, st.sampled_from([0.0, 0.1, 0.5, 3.0]), st.floats(0.01, 2.0))


@pytest.mark.quick
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_other_shares_are_faster(data) -> None:
    speeds = data.draw(st.lists(SPEEDS, min_size=1, max_size=4))
    most = data.draw(st.lists(st.integers(1, 9), min_size=len(speeds), max_size=len(speeds)))
    total = data.draw(st.integers(len(speeds), max(len(speeds), min(sum(most), 14))))
    if total > sum(most):
        with pytest.raises(ValueError, match="does not fit"):
            split(total, speeds, most)
        return
    sizes = split(total, speeds, most)
    assert sum(sizes) == total
    assert all(1 <= size <= limit for size, limit in zip(sizes, most, strict=True))
    every = itertools.product(*(range(1, limit + 1) for limit in most))
    best_s = min(longest_s(one, speeds) for one in every if sum(one) == total)
    assert longest_s(sizes, speeds) == pytest.approx(best_s, rel=1e-12)


@given(st.integers(1, 9), st.integers(0, 100))
def test_equal_ranks_get_equal_shares(ranks, total) -> None:
    sizes = split(total, [Speed(0.2, 0.01)] * ranks, [1000] * ranks)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_batch_with_fewer_samples_than_ranks_is_shared_too() -> None:
    assert sorted(split(2, [Speed(0.0, 1.0)] * 3, [5] * 3)) == [0, 1, 1]
