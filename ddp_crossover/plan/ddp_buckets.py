"""The buckets of plain DDP, and predictions of what it would do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_crossover.fusion import MB, Schedule
from ddp_crossover.plan.model_profile import ModelProfile
from ddp_crossover.plan.schedule_simulator import SimulatedStep, TimedGroup, simulate

DEFAULT_BUCKET_MB = 25.0  # DDP's own, where the user has not set bucket_cap_mb
FIRST_BUCKET_MB = 1.0  # the same
# Exposed communication, and all of it, that is less than these shares of compute is not worth a search. The second one
# because a link that takes the processor's time is faster while nothing is computed, as when it was measured.
_NEGLIGIBLE = 0.01
_NEGLIGIBLE_IN_ALL = 0.05


def simulate_ddp(profile: ModelProfile, cap_mb: float) -> SimulatedStep:
    """Predict a step of plain DDP over the profile's link.

    Args:
        profile: the model.
        cap_mb: maximum size of a bucket in MiB; with DDP's default, the first one is smaller.
    """
    assert profile.link is not None
    buckets = _buckets(profile, cap_mb)
    return simulate(buckets, profile.compute, profile.link, profile.world_size, Schedule.ALLREDUCE)


def all_communication_s(profile: ModelProfile) -> float:
    """Seconds that all gradients take alone on the profile's link."""
    assert profile.link is not None
    all_bytes = sum(spec.wire_bytes for spec in profile.specs)
    return 2 * profile.link.leg_s(all_bytes, profile.world_size)


def leaves_nothing_to_gain(profile: ModelProfile, cap_mb: float) -> bool:
    """Whether plain DDP with buckets of this size already hides its communication, and has little of it."""
    compute_s = profile.compute.compute_s
    exposed_s = simulate_ddp(profile, cap_mb).exposed_s
    return exposed_s <= _NEGLIGIBLE * compute_s and all_communication_s(profile) <= _NEGLIGIBLE_IN_ALL * compute_s


def _buckets(profile: ModelProfile, cap_mb: float) -> list[TimedGroup]:
    """What DDP makes of gradients in the order in which they arrive: a bucket is closed once it is full."""
    order = sorted(range(len(profile.specs)), key=lambda index: profile.compute.arrival_s[index])
    groups: list[TimedGroup] = []
    bucket: list[int] = []
    for index in order:
        bucket.append(index)
        full_mb = FIRST_BUCKET_MB if not groups and cap_mb == DEFAULT_BUCKET_MB else cap_mb
        group = _timed(profile, bucket)
        if group.buffer_bytes >= full_mb * MB:
            groups.append(group)
            bucket = []
    return [*groups, _timed(profile, bucket)] if bucket else groups


def _timed(profile: ModelProfile, bucket: Sequence[int]) -> TimedGroup:
    return TimedGroup(
        buffer_bytes=sum(profile.specs[index].wire_bytes for index in bucket),
        arrival_s=max(profile.compute.arrival_s[index] for index in bucket),
        use_s=0.0,
    )
