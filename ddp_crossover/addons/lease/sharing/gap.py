"""One wait of compute for communication: outside of a turn others have the device, in a turn only if it is too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from ddp_crossover.addons.lease.sharing.forward_times import Moment
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
    """A ``HostWait`` that leaves the device to other jobs.

    Args:
        what: key of the wait; waits with the same key take about the same time in each step.
        holder: holds the lease.

    Attributes:
        arrival: when that for which compute waits has arrived; None if that is not known yet.
        was_given: whether this job has given its lease away.
    """

    def __init__(self, what: Hashable, holder: LeaseHolder) -> None:
        self.arrival: Moment | None = None
        self.was_given = False
        self._what = what
        self._holder = holder
        self._began_s: float | None = None
        self._free_since_s: float | None = None
        self._polled_s = 0.0
        self._filled_s = 0.0

    def arrived(self, at_s: float) -> None:
        self.arrival = at_s

    def before_stream_waits(self, done: Event) -> None:
        """Outside of a turn, wait on the host while the device is shared: the next turn begins when the leg is done.

        What is queued behind a wait goes on by itself when the leg ends, whoever has the device then. In a turn that is
        this job, and the host may run ahead.
        """
        backlog = self._holder.backlog
        assert backlog is not None
        backlog.wait_begins(done)
        self.arrival = done
        if self._holder.is_holding or not self._holder.has_seen_others():
            return
        while not done.query():
            self.poll()
            time.sleep(_DEVICE_POLL_S)

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
            self.was_given = True
            self._free_since_s = self._polled_s = time.perf_counter()
        return _POLL_S

    def hold_until(self, ends_s: float, is_over: Callable[[], bool]) -> None:
        """Wait on for a turn that has not begun, at most until ``ends_s``, as of ``time.perf_counter()``."""
        while (left_s := ends_s - time.perf_counter()) > 0 and not is_over():
            time.sleep(min(left_s, self.poll()))

    def end(self) -> None:
        """Account for the wait, which is over."""
        holder, now_s = self._holder, time.perf_counter()
        if holder.backlog is None:
            holder.expected.note(self._what, 0.0 if self._began_s is None else now_s - self._began_s)
        if self._free_since_s is None:
            return
        self._sample(now_s)
        if self.was_given or self._filled_s:
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

    def arrived(self, at_s: float) -> None:
        pass

    def before_stream_waits(self, done: Event) -> None:
        self._backlog.wait_begins(done)
