"""Properties of the planner: nothing lost, nothing twice, nothing more padded than it must be."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_crossover.fusion import MB, FusionPlan, GradientSpec
from ddp_crossover.plan.cutting import Taper, arena_capacity, plan_fusion

# Before the tests: @given keeps the settings that it finds.
settings.register_profile("suite", deadline=None, max_examples=100)
settings.load_profile("suite")

SIZES = st.one_of(st.integers(0, 40), st.integers(0, 5_000), st.just(10**10))


TAPERS = st.builds(Taper, slope=st.floats(0.05, 2.0), smallest=st.floats(0.01, 1.0))

pytestmark = pytest.mark.quick


class Problem(NamedTuple):
    specs: list[GradientSpec]
    arrival: list[int]
    use_rank: list[int]
    world_size: int
    fusion_mb: float
    taper: Taper | None
    align_bytes: int


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    sizes = draw(st.lists(SIZES, min_size=1, max_size=30))
    arenas = {"fp32": 4, "bf16": 2}
    specs = []
    for index, numel in enumerate(sizes):
        arena = draw(st.sampled_from(sorted(arenas)))
        specs.append(GradientSpec(f"p{index}", numel, arenas[arena], arena))
    arrival = draw(st.permutations(range(len(sizes))))
    use_rank = draw(st.lists(st.integers(-1, 20), min_size=len(sizes), max_size=len(sizes)))
    world_size = draw(st.integers(1, 9))
    # Huge gradients in tiny groups would be millions of groups: keep their number sane.
    smallest = 1e-5 if max(sizes) < 10**6 else 100.0
    fusion_mb = draw(st.floats(smallest, 1000.0))
    align_bytes = draw(st.sampled_from([1, 128, 256]))
    return Problem(specs, arrival, use_rank, world_size, fusion_mb, draw(st.none() | TAPERS), align_bytes)


def plan_of(problem: Problem) -> FusionPlan:
    return plan_fusion(
        problem.specs,
        problem.arrival,
        problem.use_rank,
        world_size=problem.world_size,
        fusion_mb=problem.fusion_mb,
        taper=problem.taper,
        shard_align_bytes=problem.align_bytes,
    )


@given(problems())
def test_every_gradient_element_is_in_exactly_one_group(problem) -> None:
    specs, plan = problem[0], plan_of(problem)
    covered: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(specs))}
    for group in plan.groups:
        for piece in group.pieces:
            covered[piece.parameter].append((piece.start, piece.numel))
    for index, spec in enumerate(specs):
        end = 0
        for start, numel in sorted(covered[index]):
            assert start == end
            end += numel
        assert end == spec.numel
        assert covered[index], "even an empty gradient belongs to a group"


@given(problems())
def test_a_piece_lies_inside_its_group_where_the_gradient_lies_in_the_arena(problem) -> None:
    plan = plan_of(problem)
    for group in plan.groups:
        place = group.offset
        for piece in group.pieces:
            assert place == plan.offsets[piece.parameter] + piece.start
            place += piece.numel
        assert place + group.padding == group.offset + group.numel


@given(problems())
def test_memory_made_ahead_is_enough_for_every_plan(problem) -> None:
    specs, plan = problem[0], plan_of(problem)
    capacity = arena_capacity(specs, plan.world_size, problem.align_bytes)
    assert capacity.keys() == plan.arena_numel.keys()
    for arena, numel in plan.arena_numel.items():
        assert numel <= capacity[arena]


@given(problems())
def test_groups_tile_their_arena(problem) -> None:
    plan = plan_of(problem)
    for arena, numel in plan.arena_numel.items():
        end = 0
        for group in sorted(plan.groups, key=lambda g: (g.offset, g.numel)):
            if group.arena == arena:
                assert group.offset == end
                end += group.numel
        assert end == numel


@given(problems())
def test_shards_are_equal_and_aligned_and_padding_is_only_where_needed(problem) -> None:
    plan = plan_of(problem)
    for group in plan.groups:
        assert group.numel % plan.world_size == 0
        itemsize = problem.specs[group.pieces[0].parameter].itemsize_bytes
        assert group.numel // plan.world_size * itemsize % problem.align_bytes == 0
        assert group.offset * itemsize % problem.align_bytes == 0
        payload = sum(piece.numel for piece in group.pieces)
        assert group.padding == -payload % (plan.world_size * max(problem.align_bytes // itemsize, 1))


@given(problems())
def test_arrival_order_is_kept(problem) -> None:
    specs, arrival = problem[0], problem[1]
    plan = plan_of(problem)
    for arena in plan.arena_numel:
        carried = [p.parameter for g in plan.groups if g.arena == arena for p in g.pieces]
        distinct = list(dict.fromkeys(carried))
        assert distinct == [index for index in arrival if specs[index].arena == arena]
    last = {parameter: place for place, parameter in enumerate(arrival)}
    complete = [max(last[p.parameter] for p in group.pieces) for group in plan.groups]
    assert complete == sorted(complete)
    assert [group.index for group in plan.groups] == list(range(len(plan.groups)))


@given(problems())
def test_groups_are_gathered_in_use_order(problem) -> None:
    use_rank, plan = problem[2], plan_of(problem)
    first_use = [min(use_rank[p.parameter] for p in plan.groups[g].pieces) for g in plan.use_order]
    assert first_use == sorted(first_use)
    assert sorted(plan.use_order) == list(range(len(plan.groups)))


@given(problems())
def test_a_group_is_no_larger_than_asked_for(problem) -> None:
    specs, plan = problem[0], plan_of(problem)
    for group in plan.groups:
        itemsize = specs[group.pieces[0].parameter].itemsize_bytes
        payload = group.numel - group.padding
        smallest_possible = plan.world_size * max(problem.align_bytes // itemsize, 1)
        assert payload <= max(plan.fusion_mb * MB / itemsize, smallest_possible)


@given(problems(), TAPERS)
def test_a_tapered_group_is_no_larger_than_its_part_of_the_way_to_the_nearer_end(problem, taper) -> None:
    specs, arrival, use_rank, world_size, fusion_mb, *_ = problem
    plan = plan_fusion(specs, arrival, use_rank, world_size=world_size, fusion_mb=fusion_mb, taper=taper)
    for arena in plan.arena_numel:
        total = sum(spec.numel for spec in specs if spec.arena == arena)
        before = 0
        for group in sorted((g for g in plan.groups if g.arena == arena), key=lambda g: (g.offset, g.numel)):
            payload = group.numel - group.padding
            largest = fusion_mb * MB / specs[group.pieces[0].parameter].itemsize_bytes
            allowed = max(min(before, total - before) * taper.slope, largest * taper.smallest)
            assert payload <= max(min(allowed, largest), world_size)
            before += payload


def test_taper_leaves_the_middle_large() -> None:
    specs = [GradientSpec(f"p{index}", 100, 4, "fp32") for index in range(400)]
    plan = plan_fusion(specs, range(400), range(400), world_size=2, fusion_mb=3200 * 4 / MB, taper=Taper(1 / 2, 1 / 8))
    sizes = [group.numel for group in plan.groups]
    assert sizes[:8] == [400, 400, 400, 600, 900, 1300, 2000, 3000]
    assert set(sizes[8:-5]) == {3200}
    assert sizes[-5:] == [2700, 1300, 700, 400, 300]


@given(problems())
@settings(max_examples=20)
def test_equal_input_gives_an_equal_plan(problem) -> None:
    assert plan_of(problem).digest() == plan_of(problem).digest()


def test_different_plans_have_different_digests() -> None:
    specs = [GradientSpec("a", 10, 4, "fp32"), GradientSpec("b", 10, 4, "fp32")]
    one = plan_fusion(specs, [0, 1], [0, 1], world_size=2)
    other = plan_fusion(specs, [1, 0], [0, 1], world_size=2)
    assert one.digest() != other.digest()


@pytest.mark.parametrize("change", [{"schedule": "auto"}, {"launch_order": (("scatter", 0), ("gather", 0))}])
def test_how_groups_are_sent_is_part_of_the_digest(change) -> None:
    plan = plan_fusion([GradientSpec("a", 10, 4, "fp32")], [0], [0], world_size=2)
    assert replace(plan, **change).digest() != plan.digest()
    unsplit = replace(plan, groups=(replace(plan.groups[0], split=False),))
    assert unsplit.digest() != plan.digest()
    assert "plain all-reduce" in str(unsplit)
    assert "plain all-reduce" not in str(plan)


def test_a_plan_shows_parameters_by_name_and_their_size() -> None:
    sizes = [9, 9, 9, 9, 1_200_000]
    specs = [GradientSpec(f"{name}.weight", numel, 4, "fp32") for name, numel in zip("abcde", sizes, strict=True)]
    plan = plan_fusion(specs, [4, 3, 2, 1, 0], range(5), world_size=2, fusion_mb=1.0)
    assert str(plan).splitlines() == [
        "FusionPlan: schedule dear: 5 groups of up to 938 KiB, 4.58 MiB in all, 2 ranks",
        *(f"  [{i}] 938 KiB, gather position {5 - i}: a part of e.weight" for i in range(4)),
        "  [4] 938 KiB, gather position 1: a part of e.weight to a.weight (5 gradients)",
    ]
    assert repr(plan).splitlines()[3] == "  ... 1 more, which print(plan) shows"
    small = plan_fusion(specs[:2], [1, 0], range(2), world_size=2)
    assert "1 group of up to 72 B, 72 B in all" in str(small)
    assert str(small).splitlines()[1] == "  [0] 72 B, gather position 1: b.weight, a.weight"
    assert repr(small) == str(small)


def test_small_gradients_are_merged_and_a_large_one_is_cut_evenly() -> None:
    specs = [
        GradientSpec("large", 1000, 4, "fp32"),
        GradientSpec("a", 10, 4, "fp32"),
        GradientSpec("b", 10, 4, "fp32"),
    ]
    plan = plan_fusion(specs, [2, 1, 0], [0, 1, 2], world_size=2, fusion_mb=400 * 4 / MB)
    assert [[p.parameter for p in g.pieces] for g in plan.groups] == [[2, 1], [0], [0], [0]]
    assert [g.numel for g in plan.groups[1:]] == [334, 334, 332]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrival_order": [0, 0]}, "exactly once"),
        ({"world_size": 0}, "world_size"),
        ({"fusion_mb": 0.0}, "fusion_mb"),
        ({"fusion_mb": float("nan")}, "fusion_mb"),
    ],
)
def test_impossible_input_is_named(changes, words) -> None:
    good = {"arrival_order": [0, 1], "use_rank": [0, 1], "world_size": 2, "fusion_mb": 1.0}
    specs = [GradientSpec("a", 3, 4, "fp32"), GradientSpec("b", 3, 4, "fp32")]
    with pytest.raises(ValueError, match=words):
        plan_fusion(specs, **{**good, **changes})
