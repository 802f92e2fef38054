"""Predicted steps: the published table, and what must hold for any groups and any link."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.schedule_simulator import SimulatedStep, TimedGroup, simulate

settings.register_profile("suite", deadline=None, max_examples=100)
settings.load_profile("suite")

SCHEDULES = ("allreduce", "dear", "auto")
GROUP_BYTES = 1000

pytestmark = pytest.mark.quick


def uniform(count: int, forward_s: float, backward_s: float) -> list[TimedGroup]:
    """Equal layers; the last layer's gradient arrives first, and is used last."""
    return [
        TimedGroup(GROUP_BYTES, (i + 1) / count * backward_s, (count - 1 - i) / count * forward_s) for i in range(count)
    ]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[TimedGroup], ComputeProfile, LinkModel, int]:
    forward_s, backward_s = draw(st.floats(0.0, 1.0)), draw(st.floats(0.0, 2.0))
    part = st.floats(0.0, 1.0)
    group = st.builds(
        TimedGroup,
        buffer_bytes=st.integers(0, 10_000),
        arrival_s=part.map(lambda x: x * backward_s),
        use_s=part.map(lambda x: x * forward_s * 1.1),  # some after the forward's end: not used in it
        split=st.booleans(),
        scatter_part=part,
        gather_part=part,
        codec_s=st.floats(0.0, 0.1),
    )
    groups = draw(st.lists(group, max_size=12))
    alpha_s = st.one_of(st.just(0.0), st.floats(0.0, 0.1))
    link = LinkModel(draw(alpha_s), draw(alpha_s), draw(st.floats(0.0, 1e-4)))
    profile = ComputeProfile((), (), forward_s, backward_s, rest_s=draw(st.floats(0.0, 0.5)))
    return groups, profile, link, draw(st.integers(1, 9))


@pytest.mark.parametrize(
    ("a_over_c", "ddp", "dear", "planned"),
    [(0.8, 1.144, 1.078, 1.014), (1.0, 1.344, 1.180, 1.021), (4 / 3, 1.677, 1.349, 1.349), (2.0, 2.344, 2.016, 2.016)],
)
def test_the_table_of_the_design(a_over_c, ddp, dear, planned) -> None:
    profile = ComputeProfile((), (), forward_s=1 / 3, backward_s=2 / 3)
    groups = uniform(64, profile.forward_s, profile.backward_s)
    # On two ranks each leg sends half of its buffer: 64 groups, two legs each.
    link = LinkModel(0.0, 0.0, s_per_byte=a_over_c / (64 * GROUP_BYTES))
    predicted = [simulate(groups, profile, link, 2, schedule).step_s for schedule in SCHEDULES]
    assert predicted == pytest.approx([ddp, dear, planned], abs=1e-3)


@given(steps(), st.sampled_from(SCHEDULES))
def test_a_step_is_no_shorter_than_compute_nor_than_communication(problem, schedule) -> None:
    step = simulate(*problem, schedule)
    compute_s = problem[1].compute_s
    assert step.step_s >= max(compute_s, sum(leg.end_s - leg.start_s for leg in step.legs)) - 1e-9
    assert step.exposed_s == pytest.approx(step.step_s - compute_s, abs=1e-9)


@given(steps(), st.sampled_from(SCHEDULES))
def test_every_group_travels_once_per_period(problem, schedule) -> None:
    groups = problem[0]
    step = simulate(*problem, schedule)
    expected = Counter()
    for index, group in enumerate(groups):
        expected.update([("scatter", index), ("gather", index)] if group.split else [("all_reduce", index)])
    assert Counter(step.launch_order) == expected


@given(steps(), st.sampled_from(SCHEDULES))
def test_legs_take_turns_and_keep_their_order(problem, schedule) -> None:
    groups, _, link, _ = problem
    step = simulate(*problem, schedule)
    for earlier, later in zip(step.legs, step.legs[1:], strict=False):
        assert earlier.end_s <= later.start_s
    first_legs = [leg for leg in step.legs if leg.kind != "gather"]
    arrivals_s = [groups[leg.group].arrival_s for leg in first_legs]
    assert arrivals_s == sorted(arrivals_s)
    assert all(leg.start_s >= groups[leg.group].arrival_s - 1e-8 for leg in first_legs)
    scatter_end_s = {leg.group: leg.end_s for leg in first_legs}
    latency_s = 0.0 if schedule == "allreduce" else link.latency_s
    for leg in step.legs:
        if leg.kind == "gather":
            assert leg.start_s >= scatter_end_s[leg.group] + latency_s - 1e-8


@given(steps())
def test_gather_legs_of_the_paper_wait_for_backward_and_all_scatter_legs(problem) -> None:
    step = simulate(*problem, "dear")
    gathers = [leg for leg in step.legs if leg.kind == "gather"]
    assert step.legs[len(step.legs) - len(gathers) :] == tuple(gathers)
    assert all(leg.start_s >= problem[1].backward_s - 1e-8 for leg in gathers)


@given(steps())
def test_auto_never_leaves_the_link_idle_while_a_leg_could_go(problem) -> None:
    groups, _, link, _ = problem
    legs = simulate(*problem, "auto").legs
    ready_s = {}
    for leg in legs:
        if leg.kind == "scatter":
            ready_s[leg.group] = leg.end_s + link.latency_s + groups[leg.group].codec_s
    free_s = 0.0
    for leg in legs:
        could_s = ready_s[leg.group] if leg.kind == "gather" else groups[leg.group].arrival_s
        if leg.start_s > free_s + 1e-8:  # after a pause it was this leg that the link waited for
            assert leg.start_s == pytest.approx(could_s, abs=1e-8)
        free_s = leg.end_s


@given(st.integers(1, 80), st.floats(0.05, 4.0), st.floats(0.0, 5e-3), st.floats(0.0, 5e-3), st.floats(0.0, 0.2))
def test_each_schedule_is_no_worse_than_the_simpler_one(count, a_over_c, latency_s, per_leg_s, rest_s) -> None:
    profile = ComputeProfile((), (), forward_s=1 / 3, backward_s=2 / 3, rest_s=rest_s)
    groups = uniform(count, profile.forward_s, profile.backward_s)
    link = LinkModel(latency_s, per_leg_s, a_over_c / (count * GROUP_BYTES))
    ddp, dear, auto = (simulate(groups, profile, link, 2, schedule) for schedule in SCHEDULES)
    # A gather leg that has begun is not interrupted: it can delay a scatter leg, or the gather leg of a group that
    # is used earlier and was not reduced yet. One leg each, and one group's compute if others come in between.
    delay_s = link.leg_s(GROUP_BYTES, 2) + profile.forward_s / count + 1e-8
    assert dear.step_s <= ddp.step_s + (delay_s if latency_s else 1e-8)
    assert auto.step_s <= dear.step_s + delay_s


@given(steps(), st.floats(1.0, 8.0), st.sampled_from(["allreduce", "dear"]))
def test_a_faster_link_makes_no_step_longer(problem, factor, schedule) -> None:
    groups, profile, link, world_size = problem
    # With latency, or the time of codes, the order of gather legs may change, and a fixed priority can then lose
    # (Graham's anomaly).
    groups = [group._replace(codec_s=0.0) for group in groups]
    slow = LinkModel(0.0, link.per_leg_s, link.s_per_byte)
    fast = LinkModel(0.0, link.per_leg_s, link.s_per_byte / factor)
    before, after = (simulate(groups, profile, each, world_size, schedule) for each in (slow, fast))
    assert after.step_s <= before.step_s + 1e-9


@given(st.integers(1, 80), st.floats(0.05, 4.0), st.floats(1.0, 8.0))
def test_a_faster_link_makes_no_planned_step_longer_by_more_than_one_leg(count, a_over_c, factor) -> None:
    profile = ComputeProfile((), (), forward_s=1 / 3, backward_s=2 / 3)
    groups = uniform(count, profile.forward_s, profile.backward_s)

    def step(s_per_byte: float) -> SimulatedStep:
        return simulate(groups, profile, LinkModel(0.0, 0.0, s_per_byte), 2, "auto")

    slow = a_over_c / (count * GROUP_BYTES)
    assert step(slow / factor).step_s <= step(slow).step_s + slow * GROUP_BYTES / 2 + 1e-9


def test_latency_is_paid_by_whoever_waits_and_leaves_the_link_free() -> None:
    profile = ComputeProfile((), (), forward_s=1.0, backward_s=1.0)
    link = LinkModel(latency_s=0.5, per_leg_s=0.0, s_per_byte=2e-4)  # 0.1 s a leg on two ranks
    alone = simulate([TimedGroup(1000, 1.0, 0.0)], profile, link, 2, "auto")
    assert alone.step_s == pytest.approx(1.0 + 2 * (0.1 + 0.5) + 1.0)
    both = simulate([TimedGroup(1000, 1.0, 0.0), TimedGroup(1000, 1.0, 0.0)], profile, link, 2, "auto")
    assert both.step_s == pytest.approx(alone.step_s + 0.1)  # the second legs ride in the first ones' latency
    plain = simulate([TimedGroup(1000, 1.0, 0.0)], profile, link, 2, "allreduce")
    assert plain.step_s == pytest.approx(alone.step_s)
    unsplit = simulate([TimedGroup(1000, 1.0, 0.0, split=False)], profile, link, 2, "auto")
    assert unsplit.step_s == pytest.approx(alone.step_s)


def test_an_unsplit_group_pays_for_one_leg() -> None:
    profile = ComputeProfile((), (), forward_s=1.0, backward_s=1.0)
    link = LinkModel(0.0, per_leg_s=0.25, s_per_byte=2e-4)
    split, unsplit = (
        simulate([TimedGroup(1000, 1.0, 0.0, split)], profile, link, 2, "auto") for split in (True, False)
    )
    assert split.step_s == pytest.approx(2.7)
    assert unsplit.step_s == pytest.approx(2.45)
