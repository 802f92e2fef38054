"""Gives jobs the same order on all hosts, although brokers do not communicate: ties are settled by name. Pure.

Two jobs on two hosts must take turns in the same order on both. Otherwise both jobs compute at the same time, then both
communicate, and sharing the GPUs gains nothing. Each host can detect that state on its own: the ranks of a job leave an
exchange together, so both jobs return to a free GPU at nearly the same time, which is a *tie*. Once the order is the
same on all hosts, the jobs arrive a turn apart and ties no longer occur.

A host cannot know which job went first on other hosts. Therefore, on each host where the job whose name sorts last went
first, that job lets the other one go first when it next finds the GPU free: the GPU is *reserved* for the other job,
for as long as a tie may last. The cost is bounded by a fraction of the last hold, and by a budget that grows slowly. A
job waits for a reservation only after a turn in which it went first, so it loses no turn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from .jobs import JobKey

TIE = 0.25
"""Two jobs tie if the second one requests the resource within this fraction of the first one's hold."""
LONGEST_S = 0.05
"""A reservation ends after at most this many seconds."""
BUDGET_S = 0.05
"""All reservations of a resource together may last for this many seconds, ..."""
BUDGET_RATE = 0.002
"""... and for this fraction of the time that passes."""


class Reservation(NamedTuple):
    """A job waits although the resource is free, which is kept for ``other`` from ``since_s`` to ``until_s``."""

    other: JobKey
    since_s: float
    until_s: float


class _Tie(NamedTuple):
    """``other`` should have gone first, and came at most ``window_s`` seconds late."""

    other: JobKey
    window_s: float


class Ties:
    """The ties on one resource."""

    def __init__(self) -> None:
        self.reservation: Reservation | None = None
        self._ties: dict[JobKey, _Tie] = {}  # keyed by the job that went first
        self._budget_s = BUDGET_S
        self._budget_at_s = -math.inf

    @property
    def tied(self) -> bool:
        """Whether any job may have to wait for a reservation when it next finds the resource free."""
        return bool(self._ties)

    def note_hold(self, job: JobKey, rivals: Mapping[JobKey, float], start_s: float, end_s: float) -> None:
        """Record the end of a hold that began on a free resource. ``rivals`` maps waiting jobs to their start times."""
        window_s = min(TIE * (end_s - start_s), LONGEST_S)
        tied = [key for key, since_s in rivals.items() if since_s <= start_s + window_s and _order(key) < _order(job)]
        if tied:
            self._ties[job] = _Tie(min(tied, key=_order), window_s)

    def choose(self, first: JobKey, queue: Collection[JobKey], finds_free: bool, now_s: float) -> JobKey | None:
        """Return the job to be granted the resource, or None to reserve it for a job that is not there yet.

        Args:
            first: the job that would be granted the resource without ties.
            queue: waiting jobs. A reservation ends when a second job waits.
            finds_free: whether ``first`` has just requested a free resource for which no other job was waiting.
            now_s: the current time.
        """
        if finds_free:
            self._reserve(first, now_s)
        reservation = self.reservation
        chosen = first
        if reservation is not None:
            if reservation.other in queue:
                chosen = reservation.other
            elif len(queue) == 1 and now_s < reservation.until_s:
                return None
            self.end_reservation(now_s)
        self._ties.pop(chosen, None)  # a tie counts only for the very next turn of the job that went first
        return chosen

    def end_reservation(self, now_s: float) -> None:
        """End the reservation, if any, and charge its time to the budget."""
        if self.reservation is not None:
            self._budget_s -= now_s - self.reservation.since_s
            self.reservation = None

    def forget(self, job: JobKey, now_s: float) -> None:
        """Remove ``job``, which has left the resource."""
        self._ties = {first: tie for first, tie in self._ties.items() if job not in (first, tie.other)}
        if self.reservation is not None and self.reservation.other == job:
            self.end_reservation(now_s)

    def _reserve(self, job: JobKey, now_s: float) -> None:
        """Reserve the resource if ``job`` went first in a tie and the budget allows it."""
        tie = self._ties.pop(job, None)
        if tie is None:
            return
        self._budget_s = min(BUDGET_S, self._budget_s + BUDGET_RATE * (now_s - self._budget_at_s))
        self._budget_at_s = now_s
        if self._budget_s >= tie.window_s:
            self.reservation = Reservation(tie.other, now_s, now_s + tie.window_s)


def _order(job: JobKey) -> tuple[str, int]:
    return job.name, job.uid
