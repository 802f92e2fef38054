"""Who has which elements, and what moves when that changes: every element is somewhere once, and arrives once."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover.addons.shards.ownership import (
    Ownership,
    ParameterRange,
    everything,
    in_equal_parts,
    only,
    owners_by_cost,
    transfers,
)

NUMELS = st.lists(st.integers(0, 40), min_size=1, max_size=8).map(lambda numels: dict(enumerate(numels)))
WORLD_SIZES = st.integers(1, 5)


def elements(ranges: tuple[ParameterRange, ...]) -> list[tuple[int, int]]:
    return [(each.parameter, element) for each in ranges for element in range(each.start, each.stop)]


def of_all(numels: dict[int, int]) -> list[tuple[int, int]]:
    return [(parameter, element) for parameter, numel in numels.items() for element in range(numel)]


@st.composite
def ownerships(draw, numels: dict[int, int], world_size: int) -> Ownership:
    """Every parameter cut anywhere, and the parts given to any rank."""
    ranges: list[list[ParameterRange]] = [[] for _ in range(world_size)]
    for parameter, numel in numels.items():
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=4))})
        for start, stop in itertools.pairwise(cuts):
            ranges[draw(st.integers(0, world_size - 1))].append(ParameterRange(parameter, start, stop))
    return tuple(map(tuple, ranges))


@given(NUMELS, WORLD_SIZES)
def test_equal_parts_hold_every_element_once_and_differ_by_one(numels, world_size) -> None:
    parts = in_equal_parts(numels, world_size)
    assert sorted(element for ranges in parts for element in elements(ranges)) == of_all(numels)
    sizes = [sum(each.numel for each in ranges) for ranges in parts]
    assert max(sizes) - min(sizes) <= 1
    named = {each.parameter for ranges in parts for each in ranges}
    assert named == numels.keys()  # parameters without elements have state, too


@given(st.data(), NUMELS, WORLD_SIZES)
def test_every_rank_gets_what_it_wants_once(data, numels, world_size) -> None:
    have, want = (data.draw(ownerships(numels, world_size)) for _ in range(2))
    moves = transfers(have, want)
    for rank in range(world_size):
        got = [element for of_one in moves for element in elements(tuple(of_one[rank]))]
        assert sorted(got) == sorted(elements(want[rank]))
        for target in range(world_size):
            assert set(elements(tuple(moves[rank][target]))) <= set(elements(have[rank]))


@given(st.data(), NUMELS, WORLD_SIZES)
def test_everything_is_everything_for_those_who_want_it(data, numels, world_size) -> None:
    have = data.draw(ownerships(numels, world_size))
    moves = transfers(have, everything(have, [0]))
    assert sorted(element for of_one in moves for element in elements(tuple(of_one[0]))) == of_all(numels)
    assert all(not of_one[rank] for of_one in moves for rank in range(1, world_size))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12), WORLD_SIZES)
def test_owners_have_about_equal_costs(costs, world_size) -> None:
    owners = owners_by_cost(dict(enumerate(costs)), world_size)
    loads = [sum(costs[p] for p, owner in owners.items() if owner == rank) for rank in range(world_size)]
    # Longest first: nobody has more than the least loaded and one item on top.
    assert max(loads) - min(loads) <= max(costs) + 1e-9


def test_only_keeps_the_ranges_of_some_parameters() -> None:
    have = ((ParameterRange(0, 0, 2), ParameterRange(1, 0, 3)), (ParameterRange(0, 2, 5),))
    assert only(have, [1]) == ((ParameterRange(1, 0, 3),), ())
