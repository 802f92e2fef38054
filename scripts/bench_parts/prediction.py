"""Predictions from the profile that the arm `auto` has measured: each arm's step, and the least time of any step."""

import dataclasses

from bench_kit.training import Arm
from bench_parts.arms import ArmName
from bench_parts.least_step import least_step_s
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.ddp_buckets import simulate_ddp
from ddp_crossover.plan.model_profile import ModelProfile
from ddp_crossover.plan.search import predict_step


def measured_profile(arms: dict[str, Arm]) -> ModelProfile | None:
    """What the arm `auto` has measured, if it took part and measured link and compute."""
    auto = arms.get("auto")
    profile = auto.state.profile() if auto is not None and auto.state is not None else None
    return profile if profile is not None and profile.link is not None else None


def least_case_step_s(profile: ModelProfile, compute_s: float, all_reduce_s: float) -> float:
    """The least time of a step of this model if all compute and all communication alone take these times.

    The profile says when gradients arrive and are used. Its own sums are not those of the table: its compute shares the
    core with our hooks, and its link was measured with messages of some sizes only.
    """
    link = profile.link
    assert link is not None
    all_bytes = sum(spec.wire_bytes for spec in profile.specs)
    start_s = link.per_leg_s + link.latency_s
    sent_bytes = 2 * all_bytes * (profile.world_size - 1) / profile.world_size
    as_measured = LinkModel(link.latency_s, link.per_leg_s, max(0.0, all_reduce_s - start_s) / sent_bytes)
    return least_step_s(dataclasses.replace(profile, compute=lasting(profile.compute, compute_s), link=as_measured))


def lasting(compute: ComputeProfile, compute_s: float) -> ComputeProfile:
    """The same step on a machine that is as much faster or slower as it takes for `compute_s` to come out."""
    return compute.times(compute_s / compute.compute_s)


def predicted_steps_s(arms: dict[str, Arm]) -> dict[str, float]:
    """Predicted seconds per step of plain DDP, `dear`, `auto` and `allreduce`; empty without a profile.

    Args:
        arms: all arms by name, after their last round.
    """
    profile = measured_profile(arms)
    if profile is None:
        return {}
    assert profile.link is not None
    predicted = {}
    for name, arm in arms.items():
        kind, bucket_mb = ArmName.parse(name)
        if kind in ("ddp", "allreduce"):
            predicted[name] = simulate_ddp(profile, bucket_mb).step_s
        elif kind in ("dear", "auto") and arm.state is not None and arm.state.plan is not None:
            plan = arm.state.plan
            step = predict_step(plan, profile.specs, profile.compute, profile.link, kind)  # type: ignore[arg-type]
            predicted[name] = step.step_s
    return predicted
