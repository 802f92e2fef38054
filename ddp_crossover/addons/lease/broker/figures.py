"""Accounts for a resource's time: holding, waiting and gaps of each job. Pure; callers pass the time in seconds.

At any moment, a job that is connected to a resource is in one of three states. It *holds* the resource; it *waits* for
the resource while none of its ranks holds it; or it is in a *gap*, in which it communicates, loads data or sleeps and
does not request the resource. A gap is *filled* while another job holds the resource.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .jobs import JobKey


@dataclass
class _JobFigures:
    role: str
    held_s: float = 0.0
    waited_s: float = 0.0
    gap_s: float = 0.0
    filled_s: float = 0.0
    handoffs: int = 0

    def has_held(self, seconds: float) -> None:
        self.held_s += seconds

    def has_waited(self, seconds: float) -> None:
        self.waited_s += seconds

    def was_in_gap(self, seconds: float, *, is_filled: bool) -> None:
        self.gap_s += seconds
        if is_filled:
            self.filled_s += seconds

    def was_handed_over_to(self) -> None:
        self.handoffs += 1


class ResourceFigures:
    """Figures of one resource, kept by the broker. A job's times and counts accumulate from when it joined."""

    def __init__(self, now_s: float) -> None:
        self.holder: JobKey | None = None
        self._waiting: Collection[JobKey] = ()
        self._since_s = now_s
        self._jobs: dict[JobKey, _JobFigures] = {}

    def join(self, key: JobKey, role: str, now_s: float) -> None:
        self.change(now_s, self.holder, self._waiting)
        self._jobs.setdefault(key, _JobFigures(role))

    def leave(self, key: JobKey) -> None:
        self._jobs.pop(key, None)

    def change(self, now_s: float, holder: JobKey | None, waiting: Collection[JobKey]) -> None:
        """Account for the time until now, then record the new state. Takes less than a microsecond per job."""
        passed_s = max(0.0, now_s - self._since_s)
        for key, job in self._jobs.items():
            if key == self.holder:
                job.has_held(passed_s)
            elif key in self._waiting:
                job.has_waited(passed_s)
            else:
                job.was_in_gap(passed_s, is_filled=self.holder is not None)
        # Count a hand-off only if the resource passed directly between two jobs: then the new holder has waited.
        if holder is not None and self.holder is not None and holder != self.holder:
            self._jobs[holder].was_handed_over_to()
        self.holder, self._waiting, self._since_s = holder, waiting, self._since_s + passed_s

    def as_dicts(self) -> list[dict[str, Any]]:
        """Figures for JSON, one dict per job, sorted by user and name; complete up to the last :meth:`change`."""
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
