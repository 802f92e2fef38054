"""What becomes of a resource's time: who holds it, who waits, what fills gaps. Pure; times are passed in, in seconds.

At any moment a job that is present on a resource is in one of three states. It *holds* it; it *waits* for it (and does
not hold it, not even with another rank); or it is in a *gap*: it wants nothing, because it communicates, loads data or
sleeps. A gap is *filled* while another job holds the resource.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .holds import JobKey


@dataclass
class _Job:
    role: str
    held_s: float = 0.0
    waited_s: float = 0.0
    gap_s: float = 0.0
    filled_s: float = 0.0
    handoffs: int = 0


class ResourceFigures:
    """Of one resource, at its broker. Times and counts add up from when a job joined."""

    def __init__(self, now_s: float) -> None:
        self.holder: JobKey | None = None
        self._waiting: Collection[JobKey] = ()
        self._since_s = now_s
        self._jobs: dict[JobKey, _Job] = {}

    def join(self, key: JobKey, role: str, now_s: float) -> None:
        """A job is there, if it was not."""
        self.change(now_s, self.holder, self._waiting)
        self._jobs.setdefault(key, _Job(role))

    def leave(self, key: JobKey) -> None:
        """A job is gone, if it was there."""
        self._jobs.pop(key, None)

    def change(self, now_s: float, holder: JobKey | None, waiting: Collection[JobKey]) -> None:
        """From now on ``holder`` holds it and ``waiting`` wait. Costs less than a microsecond for each job."""
        passed_s = max(0.0, now_s - self._since_s)
        for key, job in self._jobs.items():
            if key == self.holder:
                job.held_s += passed_s
            elif key in self._waiting:
                job.waited_s += passed_s
            else:
                job.gap_s += passed_s
                if self.holder is not None:
                    job.filled_s += passed_s
        # Straight from one job to another: somebody has waited for it.
        if holder is not None and self.holder is not None and holder != self.holder:
            self._jobs[holder].handoffs += 1
        self.holder, self._waiting, self._since_s = holder, waiting, self._since_s + passed_s

    def as_dicts(self) -> list[dict[str, Any]]:
        """For JSON, one for each job, by name; complete up to the last :meth:`change`."""
        return [
            {
                "job": key.name,
                "uid": key.uid,
                "role": job.role,
                "held_s": round(job.held_s, 4),
                "waited_s": round(job.waited_s, 4),
                "gap_s": round(job.gap_s, 4),
                "filled_s": round(job.filled_s, 4),
                "handoffs": job.handoffs,
            }
            for key, job in sorted(self._jobs.items())
        ]


def with_shares(now: dict[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The broker's status with, for each job, what its figures come to per second.

    Over the time since ``before``, an earlier status; since the job joined where there is none, or where the job or the
    broker was another one then.
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
