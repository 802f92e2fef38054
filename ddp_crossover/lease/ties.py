"""One order on all hosts, though no broker knows of another: jobs that come together go by name. Pure.

Two jobs on two hosts must take turns in the same order on both; else both compute, then both communicate, and nothing
is won. That state shows on each host by itself: the ranks of a job leave an exchange together, so both jobs come back
to a free GPU at nearly the same time, which is a *tie*. Once the order is the same everywhere, they come a turn apart,
and there are no ties any more.

A host cannot know who went first elsewhere. But wherever it was the job whose name sorts last, that job *stands back*
when it next finds the GPU free: the GPU is kept for the other, for as long as a tie may last. What this may cost is
bounded by a part of the last hold, and by credit that grows slowly. A job stands back only after a turn in which it
went first, so that it loses no turn.
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
    """``job`` could have the resource, which is kept for ``other`` until then."""

    job: JobKey
    other: JobKey
    since_s: float
    until_s: float


class Ties:
    """What one resource remembers of them."""

    def __init__(self) -> None:
        self.standing_back: StandBack | None = None
        self._led: dict[JobKey, tuple[JobKey, float]] = {}  # by whoever led in a tie: the other, and how long to wait
        self._credit_s = CREDIT_S
        self._credited_at_s = -math.inf

    @property
    def tied(self) -> bool:
        """Whether some job may have to stand back when it next finds the resource free."""
        return bool(self._led)

    def note_hold(self, job: JobKey, rivals: Mapping[JobKey, float], start_s: float, end_s: float) -> None:
        """A hold ends that had found the resource free; its ``rivals`` have waited since the times given."""
        window_s = min(TIE * (end_s - start_s), LONGEST_S)
        tied = [key for key, since_s in rivals.items() if since_s <= start_s + window_s and _order(key) < _order(job)]
        if tied:
            self._led[job] = (min(tied, key=_order), window_s)

    def choose(self, first: JobKey, queue: Mapping[JobKey, float], finds_free: bool, now_s: float) -> JobKey | None:
        """Who gets the resource that would be ``first``'s, or None to keep it free.

        Args:
            queue: jobs that want it, since when. It is kept free from one only, never from two.
            finds_free: ``first`` has come just now, and nobody else was there.
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
        self._led.pop(chosen, None)  # stale, unless it is the next turn that begins like the last
        return chosen

    def stop(self, now_s: float) -> None:
        """Keep the resource for nobody."""
        if self.standing_back is not None:
            self._credit_s -= now_s - self.standing_back.since_s
            self.standing_back = None

    def forget(self, job: JobKey, now_s: float) -> None:
        """``job`` leaves the resource."""
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
