"""Holds the lease: acquires it for a turn, gives it back, and notes in the ledger what that cost."""

from __future__ import annotations

import math
import time

from ddp_crossover.gpu_sharing.backlog import Backlog
from ddp_crossover.gpu_sharing.gap_policy import ExpectedWaits
from ddp_crossover.gpu_sharing.ledger import Ledger
from ddp_crossover.lease.client import GpuLease
from ddp_crossover.tracing.clock import CommClock

# A job that waits for communication neither holds the lease nor asks for it: it is remembered for a few steps.
_REMEMBER_S = 1.0


class LeaseHolder:
    """One job's turns on its device, one after the other.

    Args:
        lease: the lease.
        clock: records turns while a trace is taken.
        ledger: adds up what turns cost.
        expected: learns what a hand-off costs.
        backlog: what the device has still to do; None on a CPU, where all is done when the host says so.

    Attributes:
        is_wanted: whether compute wants a turn now, or after the present wait.
    """

    def __init__(
        self, lease: GpuLease, clock: CommClock, ledger: Ledger, expected: ExpectedWaits, backlog: Backlog | None
    ) -> None:
        self.is_wanted = False
        self.backlog = backlog
        self._lease = lease
        self._clock = clock
        self._ledger = ledger
        self._expected = expected
        # The present turn: when it was granted, and how long it had to wait for another job.
        self._granted_s: float | None = None
        self._late_s = 0.0
        self._others_seen_s = -math.inf
        # When the host left the present turn, which the device has not finished.
        self._left_s: float | None = None

    def want(self, is_wanted: bool) -> None:
        """Want a turn, now or after the present wait, or want none."""
        self.is_wanted = is_wanted

    @property
    def is_holding(self) -> bool:
        """Whether a turn has begun, and neither the host nor the broker has ended it."""
        return self._granted_s is not None and self._left_s is None and self._lease.holding

    def has_seen_others(self) -> bool:
        """Whether another job wants or has the device, or did so in the last second."""
        now_s = time.perf_counter()
        if self._lease.contended or self._lease.taken:
            self._others_seen_s = now_s
        return now_s - self._others_seen_s < _REMEMBER_S

    def acquire(self) -> None:
        """Begin a turn if one is wanted and none is held. If the lease cannot be had, compute runs without it."""
        if self.is_wanted and not self.is_holding:
            self._acquire()

    def release(self) -> None:
        """End the turn, if there is one; on a GPU it ends when the device has done what was queued in it."""
        if self._granted_s is None or self._left_s is not None:
            return
        contended = self._lease.contended
        if contended:
            self._ledger.hand_over()
        start_s = time.perf_counter()
        self._lease.release_when(None if self.backlog is None else self.backlog.end())
        if self._lease.draining:
            self._left_s = start_s
            return
        now_s = time.perf_counter()
        if not contended:  # otherwise it includes waking another job
            self._expected.note_release(now_s - start_s)
        self._end_turn(now_s)

    def _acquire(self) -> None:
        lease, ledger = self._lease, self._ledger
        if self._left_s is None:
            self._end_turn(time.perf_counter())  # the broker may have ended the last turn
        was_taken = lease.taken
        start_s = time.perf_counter()
        granted = lease.acquire(eager=True)
        now_s = time.perf_counter()
        if self._left_s is not None:
            ended_s = lease.released_s
            if granted and ended_s < self._left_s:  # before the device had finished the last turn, which goes on
                self._left_s = None
                return
            self._end_turn(max(ended_s, self._left_s))
            # It ended while this job waited for the next one, so another job wanted that.
            was_taken = was_taken or ended_s > start_s
            start_s = max(start_s, ended_s)
        self._late_s = now_s - start_s if was_taken else 0.0
        ledger.wait_for_grant(now_s - start_s)
        if was_taken:
            ledger.disturb()
        elif granted:
            self._expected.note_acquire(now_s - start_s)
        if granted:
            self._granted_s = now_s
        else:
            self.is_wanted = False  # do not ask again before the next turn is wanted
            ledger.slow_down(self._late_s)
        if self._clock.trace is not None:
            self._clock.trace.add("lease_wait", start_s, now_s, detail=lease.job)

    def _end_turn(self, now_s: float) -> None:
        if self._granted_s is None:
            return
        self._ledger.turn_ended(now_s - self._granted_s, self._late_s)
        if self._clock.trace is not None:
            self._clock.trace.add("held", self._granted_s, now_s, detail=self._lease.job)
        self._granted_s = self._left_s = None
