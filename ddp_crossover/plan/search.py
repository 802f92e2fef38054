"""The planner's search: simulates candidate plans and takes the fastest.

Pure, like the simulator: the same input gives the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ddp_crossover.fusion import MB, FusionGroup, FusionPlan, GradientSpec, Schedule
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.cutting import Taper, plan_fusion
from ddp_crossover.plan.schedule_simulator import SimulatedStep, TimedGroup, simulate

# 0.25 to 64 MiB, two sizes an octave.
CANDIDATES_MB = tuple(2 ** (step / 2) for step in range(-4, 13))
# How group sizes may rise from the ends of an arena. Steep and flat ones: where communication is long, the link must
# never idle, and small groups go far into the middle; where it is short, a few small groups at the ends suffice.
# For 32 equal layers of 1.25 MB this saves 5 to 15 of 25 to 40 groups, and 1% of the predicted time of a step.
TAPERS = (None, *(Taper(slope, smallest) for slope in (0.25, 0.5, 1.0) for smallest in (0.5, 0.25, 0.125)))

# Predictions that differ by less than this fraction count as equal, and the larger group size wins: the model is not
# that exact, and larger groups cost the host less.
_TIE = 0.002
# Host time per group, which the simulator does not model: handing over its legs, waiting for them, and a separate
# update of its parameters. Measured: 0.25 to 0.5 ms on one core of an Intel Xeon.
HOST_PER_GROUP_S = 3e-4
# Limits the search for very large models, for which small groups would not win anyway.
_MAX_GROUPS = 1000


class Problem(NamedTuple):
    """What a search finds the best group size for.

    Attributes:
        specs, arrival_order, use_rank, world_size, shard_align_bytes: as for
            :func:`~ddp_crossover.plan.cutting.plan_fusion`.
        profile: measured compute times, one entry per parameter in the order of ``specs``.
        link: measured link between ``world_size`` ranks.
        fused_all_reduce: whether an all-reduce is one operation that pays ``per_leg_s`` once, as on NCCL. If not, it
            is a scatter and a gather leg back to back, as on our gloo link.
        host_per_group_s: seconds of the host that a group costs; of plans with equal steps, the one with fewer wins.
        codec_s_per_element: seconds by which codes delay each of the two legs, per element of a coded gradient.
    """

    specs: Sequence[GradientSpec]
    arrival_order: Sequence[int]
    use_rank: Sequence[int]
    profile: ComputeProfile
    link: LinkModel
    world_size: int
    fused_all_reduce: bool = True
    shard_align_bytes: int = 1
    host_per_group_s: float = HOST_PER_GROUP_S
    codec_s_per_element: float = 0.0

    def cost_s(self, candidate: _PredictedPlan) -> float:
        return candidate.step.step_s + len(candidate.plan.groups) * self.host_per_group_s


class _PredictedPlan(NamedTuple):
    plan: FusionPlan
    step: SimulatedStep


class PlannedStep(NamedTuple):
    """The result of a search.

    Attributes:
        plan: the best plan with ``Schedule.AUTO``, host costs of groups included.
        prefers_allreduce: whether plain all-reduces, at their best group size, are predicted to be at least as good,
            within 0.2%.
    """

    plan: FusionPlan
    prefers_allreduce: bool


def choose_plan(
    problem: Problem, plain_specs: Sequence[GradientSpec], candidates_mb: Sequence[float] = CANDIDATES_MB
) -> PlannedStep:
    """Search for the best group size.

    Args:
        problem: what is known.
        plain_specs: the gradients as plain all-reduces carry them: not coded.
        candidates_mb: group sizes to try, in MiB; ``Schedule.AUTO`` tries each with all of ``TAPERS``.
    """
    plan, step = _best(problem, Schedule.AUTO, candidates_mb)
    _, all_reduce_step = _best(problem._replace(specs=plain_specs), Schedule.ALLREDUCE, candidates_mb)
    return PlannedStep(
        plan=replace(plan, schedule=Schedule.AUTO, launch_order=step.launch_order),
        prefers_allreduce=all_reduce_step.step_s <= step.step_s * (1 + _TIE),
    )


def best_of_sizes(
    specs: Sequence[GradientSpec],
    profile: ComputeProfile,
    link: LinkModel,
    world_size: int,
    schedule: Schedule,
    *,
    fused_all_reduce: bool = True,
    candidates_mb: Sequence[float] = CANDIDATES_MB,
    codec_s_per_element: float = 0.0,
) -> tuple[float, SimulatedStep]:
    """The best group size of a schedule in MiB and its predicted step; the profile's times give the two orders."""
    parameters = range(len(specs))
    arrival_order = sorted(parameters, key=lambda index: profile.arrival_s[index])
    by_use = sorted(parameters, key=lambda index: profile.use_s[index])
    use_rank = [by_use.index(index) for index in parameters]
    problem = Problem(
        specs,
        arrival_order,
        use_rank,
        profile,
        link,
        world_size,
        fused_all_reduce,
        codec_s_per_element=codec_s_per_element,
    )
    plan, step = _best(problem, schedule, candidates_mb)
    return plan.fusion_mb, step


def _best(problem: Problem, schedule: Schedule, candidates_mb: Sequence[float]) -> _PredictedPlan:
    """The largest of the fastest group sizes, but for those that cut the model into too many groups."""
    tapers = TAPERS if schedule == Schedule.AUTO else (None,)
    total_mb = sum(spec.wire_bytes for spec in problem.specs) / MB
    sizes_mb = [mb for mb in candidates_mb if total_mb <= mb * _MAX_GROUPS] or [max(candidates_mb)]
    tried = [min((_try(problem, schedule, mb, taper) for taper in tapers), key=problem.cost_s) for mb in sizes_mb]
    fastest_s = min(map(problem.cost_s, tried))
    ties = [one for one in tried if problem.cost_s(one) <= fastest_s * (1 + _TIE)]
    return max(ties, key=lambda one: one.plan.fusion_mb)


def _try(problem: Problem, schedule: Schedule, fusion_mb: float, taper: Taper | None) -> _PredictedPlan:
    plan = plan_fusion(
        problem.specs,
        problem.arrival_order,
        problem.use_rank,
        world_size=problem.world_size,
        fusion_mb=fusion_mb,
        taper=taper,
        shard_align_bytes=problem.shard_align_bytes,
    )
    if schedule == Schedule.ALLREDUCE and problem.fused_all_reduce:
        plan = replace(plan, groups=tuple(replace(group, split=False) for group in plan.groups))
    step = predict_step(plan, problem.specs, problem.profile, problem.link, schedule, problem.codec_s_per_element)
    return _PredictedPlan(plan, step)


def predict_step(
    plan: FusionPlan,
    specs: Sequence[GradientSpec],
    profile: ComputeProfile,
    link: LinkModel,
    schedule: Schedule,
    codec_s_per_element: float = 0.0,
) -> SimulatedStep:
    """Simulate one plan. ``specs`` supplies the bytes per element on the wire."""
    groups = [_timed(group, specs, profile, codec_s_per_element) for group in plan.groups]
    return simulate(groups, profile, link, plan.world_size, schedule)


def _timed(
    group: FusionGroup, specs: Sequence[GradientSpec], profile: ComputeProfile, codec_s_per_element: float
) -> TimedGroup:
    parameters = [piece.parameter for piece in group.pieces]
    wire = specs[parameters[0]]
    return TimedGroup(
        buffer_bytes=group.numel * wire.itemsize_bytes,
        arrival_s=max(profile.arrival_s[parameter] for parameter in parameters),
        use_s=min(profile.use_s[parameter] for parameter in parameters),
        split=group.split,
        scatter_part=wire.scatter_part,
        gather_part=wire.gather_part,
        codec_s=group.numel * codec_s_per_element if wire.is_coded else 0.0,
    )
