"""Gives jobs the same order on all hosts, although brokers do not communicate: ties are settled by name. Pure.

Two jobs on two hosts must take turns in the same order on both. Otherwise both jobs compute at the same time, then both
communicate, and sharing the GPUs gains nothing. Each host can detect that state on its own: the ranks of a job leave an
exchange together, so both jobs return to a free GPU at nearly the same time, which is a *tie*. Once the order is the
same on all hosts, the jobs arrive a turn apart and ties no longer occur.

A host cannot know which job went first on other hosts. Therefore, on each host where the job whose name sorts last went
first, that job *stands back* when it next finds the GPU free: the GPU is kept free for the other job, for as long as a
tie may last. The cost is bounded by a fraction of the last hold, and by a credit that grows slowly. A job stands back
only after a turn in which it went first, so it loses no turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from .holds import JobKey

TIE = 0.25
"""Jobs tie when the second comes within this part of the first one's hold."""
LONGEST_S = 0.05
"""A GPU is kept free for at most this long at a time."""
CREDIT_S = 0.05
"""In all, it is kept free for at most this long ..."""
CREDIT_RATE = 0.002
"""... and for this part of the time."""


class StandBack(NamedTuple):
    """``job`` stands back: the resource is kept free for ``other`` from ``since_s`` to ``until_s``."""

    job: JobKey
    other: JobKey
    since_s: float
    until_s: float


class Ties:
    """The ties on one resource."""

    def __init__(self) -> None:
        self.standing_back: StandBack | None = None
        self._led: dict[JobKey, tuple[JobKey, float]] = {}  # leader of a tie: the other job, seconds to wait for it
        self._credit_s = CREDIT_S
        self._credited_at_s = -math.inf

    @property
    def tied(self) -> bool:
        """Whether any job may have to stand back when it next finds the resource free."""
        return bool(self._led)

    def note_hold(self, job: JobKey, rivals: Mapping[JobKey, float], start_s: float, end_s: float) -> None:
        """Record the end of a hold that began on a free resource. ``rivals`` maps waiting jobs to their start times."""
        window_s = min(TIE * (end_s - start_s), LONGEST_S)
        tied = [key for key, since_s in rivals.items() if since_s <= start_s + window_s and _order(key) < _order(job)]
        if tied:
            self._led[job] = (min(tied, key=_order), window_s)

    def choose(self, first: JobKey, queue: Mapping[JobKey, float], finds_free: bool, now_s: float) -> JobKey | None:
        """Return the job to be granted the resource, or None to keep it free for now.

        Args:
            first: the job that would be granted the resource without ties.
            queue: waiting jobs, with the times since when they wait. The resource is kept free only while a single
                job waits.
            finds_free: whether ``first`` has just requested a free resource for which no other job was waiting.
            now_s: the current time.
        """
        if finds_free:
            self._stand_back(first, now_s)
        waits = self.standing_back
        chosen = first
        if waits is not None:
            if waits.other in queue:
                chosen = waits.other
            elif len(queue) == 1 and now_s < waits.until_s:
                return None
            self.stop(now_s)
        self._led.pop(chosen, None)  # a tie counts only for the leader's very next turn
        return chosen

    def stop(self, now_s: float) -> None:
        """Stop keeping the resource free, and charge the time to the credit."""
        if self.standing_back is not None:
            self._credit_s -= now_s - self.standing_back.since_s
            self.standing_back = None

    def forget(self, job: JobKey, now_s: float) -> None:
        """Remove ``job``, which has left the resource."""
        self._led = {leader: led for leader, led in self._led.items() if job not in (leader, led[0])}
        if self.standing_back is not None and self.standing_back.other == job:
            self.stop(now_s)

    def _stand_back(self, job: JobKey, now_s: float) -> None:
        led = self._led.pop(job, None)
        if led is None:
            return
        other, window_s = led
        self._credit_s = min(CREDIT_S, self._credit_s + CREDIT_RATE * (now_s - self._credited_at_s))
        self._credited_at_s = now_s
        if self._credit_s >= window_s:
            self.standing_back = StandBack(job, other, now_s, now_s + window_s)


def _order(job: JobKey) -> tuple[str, int]:
    return job.name, job.uid
