"""Who exchanges slices with whom: whatever the nodes are, each rank reduces one slice, and every slice is reduced."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_crossover.collectives.leg import slice_bounds
from ddp_crossover.collectives.nodes import Nodes

pytestmark = pytest.mark.quick


@st.composite
def layouts(draw: st.DrawFn) -> list[list[int]]:
    """Equally many ranks on each node, dealt out at random, as nodes are found: in the order of their lowest ranks."""
    size, count = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    ranks = draw(st.permutations(range(size * count)))
    return sorted(sorted(ranks[i * size : (i + 1) * size]) for i in range(count))


def _all(layout: list[list[int]]) -> list[Nodes]:
    return [Nodes.of(layout, rank) for rank in range(sum(map(len, layout)))]


@given(layouts())
def test_every_slice_has_one_owner_which_all_ranks_know(layout: list[list[int]]) -> None:
    every = _all(layout)
    assert sorted(every[0].shard_of) == list(range(len(every)))
    for rank, nodes in enumerate(every):
        assert nodes.shard_of == every[0].shard_of
        assert nodes.shard_of[rank] == nodes.across.own_slice


@given(layouts())
def test_members_are_the_own_node_and_the_same_place_on_each_node(layout: list[list[int]]) -> None:
    for rank, nodes in enumerate(_all(layout)):
        node = next(ranks for ranks in layout if rank in ranks)
        assert list(nodes.local.ranks) == node
        assert list(nodes.across.ranks) == [ranks[node.index(rank)] for ranks in layout]
        for members in (nodes.local, nodes.across):
            assert members.ranks[members.own] == rank
        assert nodes.are_several == (len(node) > 1)


@given(layouts())
def test_two_ranks_mean_the_same_slice_when_they_exchange_it(layout: list[list[int]]) -> None:
    """A sends B the slice that B takes for its own, in both rounds."""
    every = _all(layout)
    for rank, nodes in enumerate(every):
        for members, of_peer in ((nodes.local, "local"), (nodes.across, "across")):
            assert len(members.peers) == len(members.ranks) - 1
            for peer, number in members.peers:
                assert peer != rank
                theirs = getattr(every[peer], of_peer)
                assert theirs.ranks == members.ranks
                assert theirs.own_slice == number
                assert theirs.cuts == members.cuts
                assert dict(theirs.peers)[rank] == members.own_slice


@given(layouts(), st.integers(0, 5000))
def test_the_second_rounds_slices_are_the_first_rounds_one_whatever_the_size(layout, numel) -> None:
    """Sizes that divide by nothing: the slices across nodes fill the node's slice without a gap."""
    for nodes in _all(layout):
        low, high = slice_bounds(numel, nodes.local.cuts, nodes.local.own_slice)
        across = nodes.across
        assert across.cuts == len(nodes.shard_of)
        bounds = [slice_bounds(numel, across.cuts, across.first + i) for i in range(len(across.ranks))]
        assert bounds[0][0] == low
        assert bounds[-1][1] == high
        assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))


@given(layouts(), st.data())
@settings(max_examples=200)
def test_two_rounds_add_up_every_rank_once(layout: list[list[int]], data: st.DataObject) -> None:
    """The legs as the rounds describe them, without a network: each rank ends with the sum of all in its slice."""
    every = _all(layout)
    numel = data.draw(st.integers(0, 64))
    # Rank r adds 2 to the power of r, so that a sum says who is in it.
    buffers = [[1 << rank] * numel for rank in range(len(every))]
    for name in ("local", "across"):
        before = [list(buffer) for buffer in buffers]
        for rank, nodes in enumerate(every):
            members = getattr(nodes, name)
            for i in range(*slice_bounds(numel, members.cuts, members.own_slice)):
                buffers[rank][i] = sum(before[peer][i] for peer in members.ranks)
    for rank, nodes in enumerate(every):
        low, high = slice_bounds(numel, len(every), nodes.shard_of[rank])
        assert buffers[rank][low:high] == [(1 << len(every)) - 1] * (high - low)


@given(st.integers(1, 9))
def test_one_rank_on_each_node_is_no_grouping(world_size: int) -> None:
    for rank in range(world_size):
        assert Nodes.of([[r] for r in range(world_size)], rank) == Nodes.flat(rank, world_size)
    assert not Nodes.flat(0, world_size).are_several


@pytest.mark.parametrize("layout", [[[0, 1], [2]], [[0], [1, 2], [3]], [[], [0]]])
def test_nodes_of_different_sizes_are_refused_with_the_way_out(layout: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"equally many ranks on each node, got .*leave out groups="):
        Nodes.of(layout, 0)


@pytest.mark.parametrize("layout", [[[0, 1], [1, 2]], [[0, 0]], [[0, 2]], [[1, 2], [3, 4]]])
def test_ranks_that_are_missing_or_occur_twice_are_refused(layout: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"do not hold each of . ranks once"):
        Nodes.of(layout, 1)
