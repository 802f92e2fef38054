"""The search takes the fastest plan it can simulate, and says when plain all-reduces are as fast."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_crossover.addons.codes.wire import wire_of
from ddp_crossover.fusion import FusionPlan, GradientSpec
from ddp_crossover.plan import search
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.cutting import plan_fusion
from ddp_crossover.plan.gradient_specs import gradient_specs
from ddp_crossover.plan.search import (
    CANDIDATES_MB,
    TAPERS,
    PlannedStep,
    Problem,
    best_of_sizes,
    choose_plan,
    predict_step,
)
from ddp_crossover.top_k import TopK
from models import DeepNet

settings.register_profile("suite", deadline=None, max_examples=40)
settings.load_profile("suite")

FORWARD_S, BACKWARD_S = 0.1, 0.2
HOST_S = 3e-4  # what the planner counts for a group

pytestmark = pytest.mark.quick


class Chain:
    """Layers one behind the other, with equal compute times."""

    def __init__(self, numels: list[int]) -> None:
        count = len(numels)
        self.specs = [GradientSpec(f"layer{i}", numel, 4, "fp32") for i, numel in enumerate(numels)]
        self.arrival_order = list(reversed(range(count)))
        self.use_rank = list(range(count))
        self.profile = ComputeProfile(
            use_s=tuple(i / count * FORWARD_S for i in range(count)),
            arrival_s=tuple((count - i) / count * BACKWARD_S for i in range(count)),
            forward_s=FORWARD_S,
            backward_s=BACKWARD_S,
        )
        self.bytes = 4 * sum(numels)

    def link(self, a_over_c: float, latency_s: float = 0.0, per_leg_s: float = 0.0) -> LinkModel:
        """A link on which all bytes of a step take ``a_over_c`` times as long as its compute, on two ranks."""
        return LinkModel(latency_s, per_leg_s, a_over_c * (FORWARD_S + BACKWARD_S) / self.bytes)

    def choose(self, link: LinkModel, candidates_mb: Sequence[float] = CANDIDATES_MB) -> PlannedStep:
        problem = Problem(self.specs, self.arrival_order, self.use_rank, self.profile, link, world_size=2)
        return choose_plan(problem, self.specs, candidates_mb)


CHAINS = st.lists(st.integers(0, 500_000), min_size=1, max_size=40).filter(any).map(Chain)
TAPER = st.sampled_from(TAPERS)
ALPHA_S = st.one_of(st.just(0.0), st.floats(0.0, 0.02))


def cost_s(chain: Chain, link: LinkModel, plan: FusionPlan) -> float:
    """Predicted time of a step, and what the groups cost the host."""
    step = predict_step(plan, chain.specs, chain.profile, link, "auto")
    return step.step_s + len(plan.groups) * HOST_S


def tried_mb(chain: Chain, candidates_mb: Sequence[float]) -> set[float]:
    """The group sizes that a search simulates."""
    with mock.patch.object(search, "plan_fusion", side_effect=plan_fusion) as made:
        chain.choose(chain.link(1.0), candidates_mb=candidates_mb)
    return {call.kwargs["fusion_mb"] for call in made.call_args_list}


@given(
    CHAINS,
    st.floats(0.1, 4.0),
    ALPHA_S,
    ALPHA_S,
    st.lists(st.tuples(st.sampled_from(CANDIDATES_MB), TAPER), min_size=9),
)
def test_no_other_plan_costs_less(chain, a_over_c, latency_s, per_leg_s, others) -> None:
    link = chain.link(a_over_c, latency_s, per_leg_s)
    plan = chain.choose(link).plan
    for fusion_mb, taper in others:
        other = plan_fusion(
            chain.specs, chain.arrival_order, chain.use_rank, world_size=2, fusion_mb=fusion_mb, taper=taper
        )
        assert cost_s(chain, link, plan) <= cost_s(chain, link, other) * 1.002 + 1e-12


@pytest.mark.parametrize("a_over_c", [1.33, 2.0])
def test_groups_of_different_sizes_cost_less_than_groups_of_one_size(a_over_c) -> None:
    chain = Chain([312_500] * 32)
    link = chain.link(a_over_c, 3e-4, 1e-4)
    alike = [
        plan_fusion(chain.specs, chain.arrival_order, chain.use_rank, world_size=2, fusion_mb=fusion_mb)
        for fusion_mb in CANDIDATES_MB
    ]
    assert cost_s(chain, link, chain.choose(link).plan) < 0.99 * min(cost_s(chain, link, plan) for plan in alike)


def test_more_overhead_per_leg_asks_for_larger_groups() -> None:
    chain = Chain([250_000] * 32)
    sizes_mb = [chain.choose(chain.link(1.0, per_leg_s=per_leg_s)).plan.fusion_mb for per_leg_s in (0.0, 1e-4, 1e-2)]
    assert sizes_mb == sorted(sizes_mb)
    assert sizes_mb[0] < sizes_mb[-1]


def test_among_equal_candidates_the_largest_groups_win() -> None:
    chain = Chain([100_000] * 4)
    planned = chain.choose(chain.link(0.0, 0.0), candidates_mb=[1.0, 4.0, 2.0])
    assert planned.plan.fusion_mb == 4.0


def test_the_plan_gains_where_communication_and_compute_are_equal() -> None:
    chain = Chain([250_000] * 64)
    assert not chain.choose(chain.link(1.0)).prefers_allreduce
    auto, dear, all_reduce = (
        best_of_sizes(chain.specs, chain.profile, chain.link(1.0), 2, schedule)[1]
        for schedule in ("auto", "dear", "allreduce")
    )
    assert auto.step_s < 0.95 * dear.step_s < 0.95 * all_reduce.step_s


def test_plain_all_reduces_are_preferred_where_splitting_gains_nothing() -> None:
    assert Chain([1000] * 4).choose(LinkModel(0.0, per_leg_s=1e-3, s_per_byte=1e-12)).prefers_allreduce
    assert Chain([250_000] * 16).choose(LinkModel(0.0, 0.0, s_per_byte=1e-15)).prefers_allreduce


def test_a_huge_model_is_not_cut_into_thousands_of_groups() -> None:
    chain = Chain([20_000_000] * 40)
    assert 0.25 not in tried_mb(chain, CANDIDATES_MB)
    assert 64.0 in tried_mb(chain, CANDIDATES_MB)
    assert tried_mb(chain, [0.5, 1.0]) == {1.0}


def test_a_group_waits_for_its_last_gradient_and_is_needed_by_its_first_use() -> None:
    specs = [GradientSpec("a", 10, 4, "fp32"), GradientSpec("b", 10, 4, "fp32")]
    profile = ComputeProfile(use_s=(0.5, 0.75), arrival_s=(2.0, 1.0), forward_s=1.0, backward_s=2.0)
    plan = plan_fusion(specs, [1, 0], [0, 1], world_size=2)
    assert len(plan.groups) == 1
    step = predict_step(plan, specs, profile, LinkModel(0.0, per_leg_s=1.0, s_per_byte=0.0), "auto")
    assert step.legs[0].start_s == 2.0
    assert step.step_s == pytest.approx(4.0 + 0.5)


def test_the_planner_knows_the_bytes_of_each_leg() -> None:
    named = list(DeepNet().named_parameters())
    specs = gradient_specs(named, wire_of(torch.int8, TopK(0.01)))
    for spec, (name, parameter) in zip(specs, named, strict=True):
        assert spec.is_coded == (parameter.dim() > 1), name
        scatter_bytes, gather_bytes = spec.itemsize_bytes * spec.scatter_part, spec.itemsize_bytes * spec.gather_part
        expected = (0.06, 1 + 2 / 64) if spec.is_coded else (4.0, 4.0)
        assert (scatter_bytes, gather_bytes) == pytest.approx(expected, rel=0.01), name
    assert 0 < wire_of(torch.int8).codec_s_per_element(torch.device("cpu")) < 1e-6
