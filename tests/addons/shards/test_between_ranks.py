"""What ranks with shards exchange at a time: of one kind, and not too much, because it takes memory of its own."""

from __future__ import annotations

import itertools
from operator import itemgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover.addons.shards.between_ranks import EXCHANGE_BYTES, in_chunks

pytestmark = pytest.mark.quick

# (dtype, bytes), with all of a dtype together.
ITEMS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, EXCHANGE_BYTES * 5 // 4)), max_size=12).map(sorted)


@given(ITEMS)
def test_a_chunk_is_of_one_kind_and_no_larger_than_it_must_be(items: list[tuple[str, int]]) -> None:
    chunks = list(in_chunks(items, itemgetter(0), itemgetter(1)))
    assert [*itertools.chain.from_iterable(chunks)] == items
    for chunk in chunks:
        assert len({kind for kind, _ in chunk}) == 1
        assert len(chunk) == 1 or sum(size for _, size in chunk) <= EXCHANGE_BYTES
    for one, after in itertools.pairwise(chunks):
        assert one[0][0] != after[0][0] or sum(size for _, size in one) + after[0][1] > EXCHANGE_BYTES
