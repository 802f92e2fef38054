"""Predictions of the simulator for each arm, from the profile that the arm `auto` has measured."""

from bench_kit.training import Arm
from bench_parts.arms import ArmName
from ddp_crossover.planning.ddp_buckets import ddp_buckets
from ddp_crossover.planning.schedule_simulator import simulate
from ddp_crossover.planning.search import predict_step


def predicted_steps_s(arms: dict[str, Arm]) -> dict[str, float]:
    """Predicted seconds per step of plain DDP, `dear`, `auto` and `allreduce`; empty without a profile.

    Args:
        arms: all arms by name, after their last round.
    """
    auto = arms.get("auto")
    profile = auto.state.profile() if auto is not None and auto.state is not None else None
    if profile is None or profile.link is None:
        return {}
    predicted = {}
    for name, arm in arms.items():
        kind, bucket_mb = ArmName.parse(name)
        if kind in ("ddp", "allreduce"):
            groups = ddp_buckets(profile, bucket_mb)
            predicted[name] = simulate(groups, profile.compute, profile.link, profile.world_size, "allreduce").step_s
        elif kind in ("dear", "auto") and arm.state is not None and arm.state.plan is not None:
            plan = arm.state.plan
            step = predict_step(plan, profile.specs, profile.compute, profile.link, kind)  # type: ignore[arg-type]
            predicted[name] = step.step_s
    return predicted
