"""What a job can read about its lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LeaseStats:
    """Counters of one process since it created its lease.

    Attributes:
        grants: how often the resource was granted.
        unleased: for each reason, how often the job continued without the lease.
        lost: how often a hold ended without a release, because it was too long or the broker went away.
        waited_s: seconds spent waiting for grants, including waits that ended without a grant.
    """

    grants: int
    unleased: Mapping[str, int]
    lost: int
    waited_s: float
