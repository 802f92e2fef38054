"""The least time of a step: no plan goes below it, an ideal link reaches it, and it is right in examples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench_parts.least_step import least_step_s
from bench_parts.prediction import lasting
from ddp_crossover.fusion import GradientSpec
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.cutting import plan_fusion
from ddp_crossover.plan.ddp_buckets import simulate_ddp
from ddp_crossover.plan.model_profile import ModelProfile
from ddp_crossover.plan.search import TAPERS, best_of_sizes, predict_step

settings.register_profile("suite", deadline=None, max_examples=100)
settings.load_profile("suite")

IDEAL = LinkModel(0.0, 0.0, s_per_byte=1e-3)
ROUNDING_S = 1e-7  # the simulator takes times that are 1e-9 apart for one moment


def model(
    legs_s: list[float], arrival_s: list[float], use_s: list[float], forward_s: float, backward_s: float, rest_s=0.0
) -> ModelProfile:
    """A model on two ranks over the ideal link; each leg sends half of a gradient, a millisecond per byte."""
    specs = tuple(GradientSpec(f"p{i}", round(2000 * leg_s), 1, "arena") for i, leg_s in enumerate(legs_s))
    return ModelProfile(specs, ComputeProfile(tuple(use_s), tuple(arrival_s), forward_s, backward_s, rest_s), IDEAL, 2)


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    """Any model: arrivals and uses in any order, some uses after the forward's end, some gradients without elements."""
    forward_s, backward_s = draw(st.floats(0.0, 1.0)), draw(st.floats(0.0, 2.0))
    part = st.floats(0.0, 1.0)
    numels = draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=10).filter(any))
    count = len(numels)
    alpha_s = st.one_of(st.just(0.0), st.floats(0.0, 0.1))
    compute = ComputeProfile(
        use_s=tuple(1.1 * forward_s * draw(part) for _ in range(count)),
        arrival_s=tuple(backward_s * draw(part) for _ in range(count)),
        forward_s=forward_s,
        backward_s=backward_s,
        rest_s=draw(st.floats(0.0, 0.5)),
    )
    specs = tuple(GradientSpec(f"p{i}", numel, 4, "float32") for i, numel in enumerate(numels))
    link = LinkModel(draw(alpha_s), draw(alpha_s), draw(st.floats(0.0, 2e-6)))
    return ModelProfile(specs, compute, link, draw(st.integers(2, 9)))


@given(
    models(),
    st.sampled_from(("allreduce", "dear", "auto")),
    st.floats(0.01, 1.0),
    st.sampled_from(TAPERS),
    st.booleans(),
)
def test_no_plan_goes_below_it(profile, schedule, fusion_mb, taper, fused) -> None:
    least_s = least_step_s(profile)
    compute = profile.compute
    order = sorted(range(len(profile.specs)), key=lambda index: compute.arrival_s[index])
    by_use = sorted(range(len(profile.specs)), key=lambda index: compute.use_s[index])
    use_rank = [by_use.index(index) for index in range(len(profile.specs))]
    plan = plan_fusion(
        profile.specs, order, use_rank, world_size=profile.world_size, fusion_mb=fusion_mb, taper=taper
    )  # fmt: skip
    assert predict_step(plan, profile.specs, compute, profile.link, schedule).step_s >= least_s - ROUNDING_S
    _, best = best_of_sizes(
        profile.specs, compute, profile.link, profile.world_size, schedule, fused_all_reduce=fused
    )  # fmt: skip
    assert best.step_s >= least_s - ROUNDING_S
    assert simulate_ddp(profile, fusion_mb).step_s >= least_s - ROUNDING_S


@given(models())
def test_it_is_no_less_than_compute_nor_than_communication(profile) -> None:
    bytes_of_all = sum(spec.numel * spec.itemsize_bytes for spec in profile.specs)
    on_the_wire_s = 2 * (profile.link.leg_s(bytes_of_all, profile.world_size) - profile.link.per_leg_s)
    assert least_step_s(profile) >= max(profile.compute.compute_s, on_the_wire_s) * (1 - 1e-9)


@st.composite
def slotted_models(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int, int]:
    """(slots of a leg, arrival, use) of each gradient, length of the forward and of the backward: whole slots."""
    forward, backward = draw(st.integers(0, 12)), draw(st.integers(0, 20))
    gradient = st.tuples(st.integers(1, 4), st.integers(0, backward), st.integers(0, forward))
    return draw(st.lists(gradient, min_size=1, max_size=6)), forward, backward


@given(slotted_models())
def test_an_ideal_link_reaches_it(problem) -> None:
    gradients, forward, backward = problem
    legs, arrivals, uses = zip(*gradients, strict=True)
    profile = model(list(legs), list(arrivals), list(uses), forward, backward)
    assert least_step_s(profile) == pytest.approx(forward + backward + least_wait(gradients, backward))


def least_wait(gradients: list[tuple[int, int, int]], backward: int) -> int:
    """Slots that the forward waits, found by trying: a link that is assigned slot by slot, earliest deadline first."""
    for wait in range(sum(2 * leg for leg, _, _ in gradients) + 1):
        jobs = [[2 * leg, arrival, backward + wait + use] for leg, arrival, use in gradients]
        for now in range(backward + wait + max(use for _, _, use in gradients)):
            ready = [job for job in jobs if job[0] and job[1] <= now]
            if ready:  # a gradient of two slots is scattered in the first and gathered in the second
                min(ready, key=lambda job: job[2])[0] -= 1
            if any(left and deadline <= now + 1 for left, _, deadline in jobs):
                break
        if not any(left for left, _, _ in jobs):
            return wait
    raise AssertionError("all gradients after the backward fit into their own time")


def test_the_last_to_arrive_is_the_first_to_be_used() -> None:
    # Compute is 9 and the link is busy for 4, but the first layer's two legs fit nowhere else than after the backward.
    assert least_step_s(model([1, 1], arrival_s=[6, 3], use_s=[0, 1], forward_s=3, backward_s=6)) == 9 + 2


def test_the_link_cannot_begin_before_the_first_arrival_nor_end_after_the_last_use() -> None:
    # The link is busy for 10 of 9, idle until 1, and idle again for the last 2 of the forward.
    assert least_step_s(model([5], arrival_s=[1], use_s=[1], forward_s=3, backward_s=6)) == 10 + 1 + 2


def test_a_parameter_that_the_forward_does_not_use_is_needed_at_its_end() -> None:
    assert least_step_s(model([5], arrival_s=[1], use_s=[9], forward_s=3, backward_s=6)) == 10 + 1


def test_other_compute_hides_legs_of_the_last_arrival() -> None:
    assert least_step_s(model([1], arrival_s=[6], use_s=[0], forward_s=3, backward_s=6, rest_s=1.5)) == 9 + 1.5 + 0.5


def test_the_last_arrival_pays_for_starting_both_legs() -> None:
    short = model([0.001], arrival_s=[6], use_s=[0], forward_s=3, backward_s=6)
    slow_start = ModelProfile(short.specs, short.compute, LinkModel(0.2, 0.1, 1e-3), 2)
    # Its only byte is scattered, arrives, is gathered, and arrives: two latencies, which nothing can fill.
    assert least_step_s(slow_start) == pytest.approx(9 + 0.1 + 0.001 + 2 * 0.2)
    many = model([1.0], arrival_s=[6], use_s=[0], forward_s=3, backward_s=6)
    # While the last element is on its way, others are gathered: one latency remains.
    slow_start = ModelProfile(many.specs, many.compute, LinkModel(0.2, 0.1, 1e-3), 2)
    assert least_step_s(slow_start) == pytest.approx(9 + 0.1 + 2 + 0.2)


def test_fine_pieces_come_close_to_it() -> None:
    """Equal layers, as long on the link as in compute: small groups come close."""
    layers = 64
    profile = model(
        [1 / 384] * layers,
        arrival_s=[(layers - i) / layers * 2 / 3 for i in range(layers)],
        use_s=[i / layers / 3 for i in range(layers)],
        forward_s=1 / 3,
        backward_s=2 / 3,
    )
    _, best = best_of_sizes(profile.specs, profile.compute, profile.link, 2, "auto", candidates_mb=[1e-6])
    assert math.isclose(best.step_s, least_step_s(profile), rel_tol=0.02)


def test_a_slower_machine_takes_longer_for_each_part() -> None:
    compute = ComputeProfile((0.0, 1.0), (4.0, 2.0), forward_s=2.0, backward_s=4.0, rest_s=2.0)
    assert lasting(compute, 16.0) == ComputeProfile((0.0, 2.0), (8.0, 4.0), forward_s=4.0, backward_s=8.0, rest_s=4.0)
