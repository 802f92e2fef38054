"""The planner's search: simulate candidate plans, take the fastest.

Pure, like what it searches with: the same input gives the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_crossover.cost_model import ComputeProfile, LinkModel
from ddp_crossover.fusion import MB, FusionGroup, FusionPlan, GradientSpec, plan_fusion
from ddp_crossover.schedule_simulator import Schedule, SimulatedStep, TimedGroup, simulate

# 0.25 to 64 MiB, two sizes an octave.
CANDIDATES_MB = tuple(2 ** (step / 2) for step in range(-4, 13))

# Predictions nearer than this are equal: the model is not that exact, and larger groups cost the host less.
_TIE = 0.002
# Bounds the search for very large models, whose small groups would lose anyway.
_MAX_GROUPS = 1000
_MAX_PLAIN_TRIALS = 16


@dataclass(frozen=True)
class PlannedStep:
    """The best plan of a search, and what the others would take.

    Attributes:
        plan: the plan with the shortest predicted step, schedule ``"auto"``.
        step_s: its predicted step in seconds.
        candidates_s: predicted step per group size in MiB, schedule ``"auto"``.
        allreduce_s: predicted step of plain all-reduces, at their best group size.
        prefers_allreduce: whether plain all-reduces are predicted to be at least as good, within 0.2%.
    """

    plan: FusionPlan
    step_s: float
    candidates_s: dict[float, float]
    allreduce_s: float
    prefers_allreduce: bool


def choose_plan(
    specs: Sequence[GradientSpec],
    arrival_order: Sequence[int],
    use_rank: Sequence[int],
    profile: ComputeProfile,
    link: LinkModel,
    *,
    world_size: int,
    wire_itemsize_bytes: int | None = None,
    candidates_mb: Sequence[float] = CANDIDATES_MB,
) -> PlannedStep:
    """Search the group size, and the small groups for which one all-reduce beats two legs.

    Args:
        specs, arrival_order, use_rank, world_size: as for :func:`~ddp_crossover.fusion.plan_fusion`.
        profile: measured compute times, one entry per parameter in the order of ``specs``.
        link: measured link between this number of ranks.
        wire_itemsize_bytes: bytes per element on the wire, where gradients travel in another dtype than their own.
            Group sizes in MiB then mean bytes on the wire.
        candidates_mb: group sizes to try, in MiB.

    Raises:
        ValueError: if the profile does not belong to these parameters, or there is no candidate.
    """
    if len(profile.use_s) != len(specs):
        raise ValueError(f"the profile was measured with {len(profile.use_s)} parameters, the model has {len(specs)}")
    if not candidates_mb:
        raise ValueError("candidates_mb must name at least one group size")
    if wire_itemsize_bytes is not None:
        specs = [replace(spec, itemsize_bytes=wire_itemsize_bytes) for spec in specs]
    plans = {
        fusion_mb: plan_fusion(specs, arrival_order, use_rank, world_size=world_size, fusion_mb=fusion_mb, taper=True)
        for fusion_mb in worthwhile_sizes_mb(specs, candidates_mb)
    }
    candidates_s = {mb: predict_step(plan, specs, profile, link, "auto").step_s for mb, plan in plans.items()}
    allreduce_s = min(
        predict_step(_unsplit(plan, plan.groups), specs, profile, link, "allreduce").step_s for plan in plans.values()
    )
    fastest_s = min(candidates_s.values())
    best_mb = max(mb for mb, step_s in candidates_s.items() if step_s <= fastest_s * (1 + _TIE))
    plan, step = _with_plain_groups(plans[best_mb], specs, profile, link)
    return PlannedStep(
        plan=replace(plan, schedule="auto", launch_order=step.launch_order),
        step_s=step.step_s,
        candidates_s=candidates_s,
        allreduce_s=allreduce_s,
        prefers_allreduce=allreduce_s <= step.step_s * (1 + _TIE),
    )


def worthwhile_sizes_mb(specs: Sequence[GradientSpec], candidates_mb: Sequence[float]) -> list[float]:
    """Candidates without those that cut the model into more groups than a step could handle; never none."""
    total_mb = sum(spec.numel * spec.itemsize_bytes for spec in specs) / MB
    return [mb for mb in candidates_mb if total_mb <= mb * _MAX_GROUPS] or [max(candidates_mb)]


def predict_step(
    plan: FusionPlan, specs: Sequence[GradientSpec], profile: ComputeProfile, link: LinkModel, schedule: Schedule
) -> SimulatedStep:
    """Simulate one plan. ``specs`` gives the bytes per element on the wire."""
    groups = [_timed(group, specs, profile) for group in plan.groups]
    return simulate(groups, profile, link, plan.world_size, schedule)


def _timed(group: FusionGroup, specs: Sequence[GradientSpec], profile: ComputeProfile) -> TimedGroup:
    parameters = [piece.parameter for piece in group.pieces]
    return TimedGroup(
        buffer_bytes=group.numel * specs[parameters[0]].itemsize_bytes,
        arrival_s=max(profile.arrival_s[parameter] for parameter in parameters),
        use_s=min(profile.use_s[parameter] for parameter in parameters),
        split=group.split,
    )


def _with_plain_groups(
    plan: FusionPlan, specs: Sequence[GradientSpec], profile: ComputeProfile, link: LinkModel
) -> tuple[FusionPlan, SimulatedStep]:
    """Leave small groups unsplit, one by one, where that shortens the step."""
    step = predict_step(plan, specs, profile, link, "auto")
    for group in _overhead_bound(plan, specs, link)[:_MAX_PLAIN_TRIALS]:
        trial = _unsplit(plan, [group])
        trial_step = predict_step(trial, specs, profile, link, "auto")
        if trial_step.step_s < step.step_s:
            plan, step = trial, trial_step
    return plan, step


def _overhead_bound(plan: FusionPlan, specs: Sequence[GradientSpec], link: LinkModel) -> list[FusionGroup]:
    """Groups whose legs take longer to begin than to send, smallest first: for them a leg saved may beat overlap."""

    def leg_s(group: FusionGroup) -> float:
        return link.leg_s(group.numel * specs[group.pieces[0].parameter].itemsize_bytes, plan.world_size)

    return sorted((g for g in plan.groups if leg_s(g) < 2 * link.per_leg_s), key=lambda g: (leg_s(g), g.index))


def _unsplit(plan: FusionPlan, groups: Sequence[FusionGroup]) -> FusionPlan:
    plain = {group.index for group in groups}
    return replace(plan, groups=tuple(replace(g, split=g.split and g.index not in plain) for g in plan.groups))
