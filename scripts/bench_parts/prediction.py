"""Predictions of the simulator for each arm, from the profile that the arm `auto` has measured."""

from collections.abc import Sequence

from bench_kit.training import Arm
from bench_parts.arms import DEFAULT_BUCKET_MB, ArmName
from ddp_crossover.fusion import MB, GradientSpec
from ddp_crossover.planning.model_profile import ModelProfile
from ddp_crossover.planning.schedule_simulator import TimedGroup, simulate
from ddp_crossover.planning.search import predict_step

FIRST_BUCKET_MB = 1.0  # DDP's own, where the user has not set bucket_cap_mb


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


def ddp_buckets(profile: ModelProfile, cap_mb: float) -> list[TimedGroup]:
    """The buckets that DDP makes of gradients in the order in which they arrive: one is closed once it is full."""
    order = sorted(range(len(profile.specs)), key=lambda index: profile.compute.arrival_s[index])
    groups: list[TimedGroup] = []
    bucket: list[int] = []
    for index in order:
        bucket.append(index)
        full_mb = FIRST_BUCKET_MB if not groups and cap_mb == DEFAULT_BUCKET_MB else cap_mb
        if _bytes(profile.specs, bucket) >= full_mb * MB:
            groups.append(_timed(profile, bucket))
            bucket = []
    return [*groups, _timed(profile, bucket)] if bucket else groups


def _timed(profile: ModelProfile, bucket: Sequence[int]) -> TimedGroup:
    return TimedGroup(
        buffer_bytes=_bytes(profile.specs, bucket),
        arrival_s=max(profile.compute.arrival_s[index] for index in bucket),
        use_s=0.0,
    )


def _bytes(specs: Sequence[GradientSpec], indices: Sequence[int]) -> int:
    return sum(specs[index].numel * specs[index].itemsize_bytes for index in indices)
