"""One wait of compute for communication: in a turn, the lease may be given away meanwhile."""

from __future__ import annotations

import time
from collections.abc import Hashable

from ddp_crossover.addons.lease.sharing.lease_holder import Backlog, LeaseHolder
from ddp_crossover.device import Event

# Polling interval during a wait, which is also the longest delay of a job that asks for the lease in that time. Each
# poll costs about 10 us of an idle core.
_POLL_S = 1e-3
# The same where the device waits and the host looks when it ends: what is queued next is late by half of this.
_DEVICE_POLL_S = 1e-4
# Nothing is done between two polls of a wait outside of turns.
_IDLE_POLL_S = 1.0


class Gap:
    """A ``HostWait`` that gives the lease away if another job wants it and the wait is long.

    Args:
        what: key of the wait; waits with the same key take about the same time in each step.
        holder: holds the lease.
    """

    def __init__(self, what: Hashable, holder: LeaseHolder) -> None:
        self._what = what
        self._holder = holder
        self._began_s: float | None = None
        self._free_since_s: float | None = None
        self._polled_s = 0.0
        self._was_given = False
        self._is_unmeasured = False
        self._filled_s = 0.0

    def before_stream_waits(self, done: Event) -> None:
        """Keep the host from running ahead of the device while it is shared with another job.

        What is queued behind a wait goes on by itself when the leg ends, whoever has the device then. So nothing more
        is queued until the leg is done, and the lease can be given away as soon as the device has nothing to do.
        """
        backlog = self._holder.backlog
        assert backlog is not None
        backlog.wait_begins(done)
        if done.query():
            return
        if not self._is_worth_blocking():
            self._is_unmeasured = True
            return
        while not done.query():
            if not self._holder.is_holding or backlog.stands_at_last_wait() or backlog.stands_for_long():
                self.poll()
            time.sleep(_DEVICE_POLL_S)

    def _is_worth_blocking(self) -> bool:
        if not self._holder.has_seen_others():
            return False
        # Without a turn, the next one should begin only when the leg is done.
        return not self._holder.is_holding or self._holder.expected.is_worth_trying(self._what)

    def poll(self) -> float:
        """Give the lease away if that pays now; returns the seconds until the next poll."""
        holder, now_s = self._holder, time.perf_counter()
        if self._began_s is None:
            self._began_s = now_s
            if not holder.is_holding:  # the turn has not begun
                self._free_since_s = self._polled_s = now_s
        if self._free_since_s is not None:
            self._sample(now_s)
        elif holder.lease.contended and holder.expected.is_worth_giving(self._what, now_s - self._began_s):
            holder.release()
            self._was_given = True
            self._free_since_s = self._polled_s = time.perf_counter()
        return _POLL_S

    def end(self) -> None:
        """Account for the wait, which is over."""
        holder, now_s = self._holder, time.perf_counter()
        if not self._is_unmeasured:
            holder.expected.note(self._what, 0.0 if self._began_s is None else now_s - self._began_s)
        if self._free_since_s is None:
            return
        self._sample(now_s)
        if self._was_given or self._filled_s:
            holder.ledger.gap_ended(now_s - self._free_since_s, self._filled_s)
            if holder.clock.trace is not None:
                holder.clock.trace.add("gap", self._free_since_s, now_s, detail=holder.lease.job)

    def _sample(self, now_s: float) -> None:
        if self._holder.lease.taken:
            self._filled_s += now_s - self._polled_s
        self._polled_s = now_s


class WaitOutsideOfTurn:
    """A ``HostWait`` that only notes what the stream waits for: the next turn is queued behind it."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog

    def poll(self) -> float:
        return _IDLE_POLL_S

    def before_stream_waits(self, done: Event) -> None:
        self._backlog.wait_begins(done)
