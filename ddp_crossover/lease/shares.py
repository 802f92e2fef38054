"""Turns the broker's sums of times into shares of each job's time, for ``lease status`` and ``lease top``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_shares(now: dict[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Add to each job in the broker's status ``now`` its shares of time and its hand-offs per second.

    They cover the time since ``before``, an earlier status. Without ``before``, or if the job or the broker was
    restarted since, they cover the time since the job joined. Modifies and returns ``now``.
    """
    earlier = {}
    if before is not None and before["pid"] == now["pid"]:
        earlier = {(r["resource"], j["uid"], j["job"]): j for r in before["resources"] for j in r["jobs"]}
    for resource in now["resources"]:
        for job in resource["jobs"]:
            job.update(_shares(job, earlier.get((resource["resource"], job["uid"], job["job"]))))
    return now


def _shares(job: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, float]:
    if before is None or _present_s(before) > _present_s(job):
        before = dict.fromkeys(job, 0)
    passed = {name: job[name] - before[name] for name in ("held_s", "waited_s", "gap_s", "filled_s", "handoffs")}
    present_s = _present_s(passed)
    shares = {
        "held": _ratio(passed["held_s"], present_s),
        "waited": _ratio(passed["waited_s"], present_s),
        "gap": _ratio(passed["gap_s"], present_s),
        "gap_filled": _ratio(passed["filled_s"], passed["gap_s"]),
        "handoffs_per_s": _ratio(passed["handoffs"], present_s),
    }
    return {name: round(share, 4) for name, share in shares.items()}


def _present_s(job: Mapping[str, float]) -> float:
    return job["held_s"] + job["waited_s"] + job["gap_s"]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
