"""The buckets of plain DDP, for predictions of what it would do."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_crossover.fusion import MB, GradientSpec
from ddp_crossover.planning.model_profile import ModelProfile
from ddp_crossover.planning.schedule_simulator import TimedGroup

DEFAULT_BUCKET_MB = 25.0  # DDP's own, where the user has not set bucket_cap_mb
FIRST_BUCKET_MB = 1.0  # the same


def ddp_buckets(profile: ModelProfile, cap_mb: float) -> list[TimedGroup]:
    """Return the buckets that DDP makes of gradients in the order in which they arrive: one is closed once it is full.

    Args:
        profile: the model.
        cap_mb: maximum size of a bucket in MiB; with DDP's default, the first one is smaller.
    """
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
