"""Holds a forward until it can run through, while another job wants the device: one gap a step instead of many.

A wrong prediction costs a stall or a later forward, and no bit: each wait still waits for its leg.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ddp_crossover.addons.lease.sharing.forward_start import ForwardStarts, start_s
from ddp_crossover.addons.lease.sharing.forward_times import Begin, DeviceClock, ForwardTimes, Moment
from ddp_crossover.addons.lease.sharing.gap import Gap
from ddp_crossover.addons.lease.sharing.lease_holder import LeaseHolder
from ddp_crossover.comm.stream_order import CudaStreams

_DRAIN_POLL_S = 1e-4
# Of steps whose times the device has not come to; more are only there if it stands still.
_MOST_OPEN = 4


class HeldFigures(NamedTuple):
    """Sums over forwards that were held; what they mean stands at :class:`ddp_crossover.report.stats.LeaseUse`."""

    predicted_s: float = 0.0
    stalls_s: float = 0.0
    late_s: float = 0.0


class HeldForward:
    """One model's forwards, each between the end of a backward and the next one.

    Args:
        holder: holds the lease.
        streams: the streams of the device; None on a CPU.

    Attributes:
        figures: what predictions were worth so far.
    """

    def __init__(self, holder: LeaseHolder, streams: CudaStreams | None) -> None:
        self.figures = HeldFigures()
        self._holder = holder
        self._clock = DeviceClock(streams)
        self._starts = ForwardStarts()
        self._times: ForwardTimes | None = None
        self._open: deque[ForwardTimes] = deque(maxlen=_MOST_OPEN)

    def backward_ended(self) -> None:
        """Begin an iteration. Without another job around nothing is measured."""
        if self._times is not None and self._times.begin is not None:
            self._open.append(self._times)
        self._times = ForwardTimes(self._clock.now()) if self._holder.has_seen_others() else None

    def comes_to_wait(self) -> Moment | None:
        """Mark a wait of this forward; None if nothing is measured."""
        return None if self._times is None else self._clock.now()

    def hold(self, gap: Gap, last_has_arrived: Callable[[], bool]) -> None:
        """Wait behind the first wait until forward is predicted to run through, or until nothing is left to wait for.

        Args:
            gap: the first wait, outside of a turn.
            last_has_arrived: whether all gather legs have.
        """
        self._learn()
        predicted_s = self._starts.predicted_s
        if self._times is None or self._times.begin is not None or predicted_s is None:
            return
        now = self._clock.now()
        while not DeviceClock.has_happened(now) and not last_has_arrived():
            time.sleep(_DRAIN_POLL_S)  # its own backward is under way
        since_s = self._times.since_end_s(Begin(time.perf_counter(), now)) if DeviceClock.has_happened(now) else 0.0
        gap.hold_until(time.perf_counter() + predicted_s - since_s - self._starts.lead_s, last_has_arrived)

    def ended_wait(self, before: Moment | None, gap: Gap, granted_after_s: float) -> None:
        """Note a wait of this forward, behind which it computes; at the first one it begins.

        Args:
            before: from :meth:`comes_to_wait`.
            gap: the wait.
            granted_after_s: how long the turn behind it had to be waited for.
        """
        times = self._times
        if times is None or before is None or gap.arrival is None:
            return
        if times.begin is None:
            times.begins(Begin(time.perf_counter(), self._clock.now()))
            self._starts.note_grant(granted_after_s)
        # On the host another job may have had a turn since; a stream goes on when the leg is there.
        resumed = time.perf_counter() if isinstance(gap.arrival, float) else gap.arrival
        times.waited(before, gap.arrival, resumed)

    def _learn(self) -> None:
        """Note the times of forwards that the device has ended."""
        while self._open and self._open[0].are_known():
            times = self._open.popleft()
            if uses := times.uses():
                self._judge(could_begin_s=start_s(uses), began_s=times.begin_s())

    def _judge(self, could_begin_s: float, began_s: float) -> None:
        predicted_s, figures = self._starts.predicted_s, self.figures
        self._starts.note(could_begin_s)
        if predicted_s is not None:
            self.figures = HeldFigures(
                figures.predicted_s + predicted_s,
                figures.stalls_s + max(0.0, could_begin_s - began_s),
                figures.late_s + max(0.0, began_s - could_begin_s),
            )
