"""Holds a model's lease while its training computes, and releases it while training waits for communication.

This module knows the lease but not DDP. Problems with the lease never stop training, so nothing is raised here for
them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator

from ddp_crossover import device as gpu
from ddp_crossover.addons.lease.client import GpuLease
from ddp_crossover.addons.lease.sharing.gap import Gap, WaitOutsideOfTurn
from ddp_crossover.addons.lease.sharing.gap_policy import MIN_GAIN, Gain
from ddp_crossover.addons.lease.sharing.held_forward import HeldForward
from ddp_crossover.addons.lease.sharing.lease_holder import Backlog, LeaseHolder, Ledger
from ddp_crossover.comm.leg import HostWait
from ddp_crossover.comm.stream_order import CudaStreams
from ddp_crossover.device import Stream
from ddp_crossover.report.clock import CommClock
from ddp_crossover.report.stats import LeaseUse

_CONNECT_S = 1.0


class Turns:
    """Takes turns on the device with other jobs.

    Args:
        lease: the lease.
        clock: records turns while a trace is taken.
        note_fallback: called with the reason when sharing has not paid.
        streams: the streams of the device; None on a CPU.
        waiting: the context of a wait for a turn, which is not compute.

    Attributes:
        ledger: figures of the turns so far.
    """

    def __init__(
        self,
        lease: GpuLease,
        clock: CommClock,
        note_fallback: Callable[[str], None],
        streams: CudaStreams | None = None,
        waiting: Callable[[Hashable], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
    ) -> None:
        if not isinstance(lease, GpuLease):
            raise TypeError(f"lease must be a ddp_crossover.GpuLease, got {type(lease).__name__}")
        self.ledger = Ledger()
        self._note_fallback = note_fallback
        self._gain = Gain()
        self._waiting = waiting
        self._holder = LeaseHolder(lease, clock, self.ledger, None if streams is None else Backlog(streams))
        self._forward = HeldForward(self._holder, streams)
        # Otherwise the first turns would run unleased, before the client has connected.
        lease.wait_until_connected(_CONNECT_S)

    @property
    def disturbances(self) -> int:
        """How often another job has wanted or held the device so far."""
        return self.ledger.disturbances

    # Called by training where compute begins, ends or waits.

    def want(self) -> None:
        """Ask for a turn: it begins at the next :meth:`resume`, or after the next wait."""
        self._holder.want(self._gain.sharing)

    def resume(self) -> None:
        """Acquire the lease before compute, if a turn is wanted and the lease is not held."""
        if self._holder.is_wanted and not self._holder.is_holding:
            with self._waiting("a turn"):
                self._holder.acquire()

    def release(self) -> None:
        """End the turn, because no compute follows until the next :meth:`want`."""
        self._holder.want(False)
        self._holder.release()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release the lease around a blocking exchange between ranks."""
        was_wanted = self._holder.is_wanted
        self.release()
        yield
        if was_wanted:
            self.want()
            self.resume()

    @contextlib.contextmanager
    def gap(self, what: Hashable, last_has_arrived: Callable[[], bool] | None = None) -> Iterator[HostWait | None]:
        """Wrap a wait of compute for communication. The first one of a forward is held until that can run through.

        In a turn the lease is given away if another job wants it and the wait is much longer than expected: it may be
        part of a deadlock.

        Args:
            what: key of the wait; waits with the same key take about the same time in each step.
            last_has_arrived: for the waits of a forward: whether all that they are for has arrived.

        Returns:
            A context manager that yields the object to poll while the host waits, or None without a turn.
        """
        holder = self._holder
        if not holder.is_wanted:
            yield None if holder.backlog is None else WaitOutsideOfTurn(holder.backlog)
            return
        gap = Gap(what, holder)
        before = None if last_has_arrived is None else self._forward.comes_to_wait()
        try:
            yield gap
            if last_has_arrived is not None and not holder.is_holding and not gap.was_given:
                self._forward.hold(gap, last_has_arrived)
        except BaseException:
            self.release()  # a leg failed, or Ctrl-C: training may not go on
            raise
        gap.end()
        asked_s = time.perf_counter()
        holder.acquire()
        self._forward.ended_wait(before, gap, granted_after_s=time.perf_counter() - asked_s)

    def before_stream_waits(self, stream: Stream) -> None:
        """Note that the current stream is going to wait for all that is queued on ``stream`` now."""
        if self._holder.backlog is not None:
            self._holder.backlog.wait_begins(gpu.record(stream))

    def step_ended(self) -> None:
        """Account for the iteration that has ended with its backward, and start or end a break from sharing."""
        self._forward.backward_ended()
        step = self.ledger.step_ended(time.perf_counter())
        # A filler takes no breaks: without the lease it would slow down the peer.
        if step is None or self._holder.lease.role == "filler":
            return
        took_break = self._gain.takes_break
        self._gain.step(step)
        if self._gain.takes_break and not took_break:
            self._note_fallback(
                f"beside another job, steps were not {MIN_GAIN:.0%} shorter with the lease than without it: it takes a "
                "break"
            )

    def stats(self) -> LeaseUse:
        """Use of the lease so far, times in seconds."""
        seen, ledger, held = self._holder.lease.stats(), self.ledger, self._forward.figures
        return LeaseUse(
            held_s=ledger.held_s,
            gaps=ledger.gaps,
            given_s=ledger.given_s,
            filled_s=ledger.filled_s,
            regrant_s=ledger.regrant_s,
            predicted_s=held.predicted_s,
            stalls_s=held.stalls_s,
            late_s=held.late_s,
            hand_offs=ledger.hand_offs,
            gain=self._gain.last,
            sharing=not self._gain.takes_break,
            grants=seen.grants,
            lost=seen.lost,
            unleased=seen.unleased,
        )
