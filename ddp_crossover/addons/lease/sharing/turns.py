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
    def gap(self, what: Hashable) -> Iterator[HostWait | None]:
        """Wrap a wait of compute for communication. Gives the lease away if another job wants it and the wait is long.

        Args:
            what: key of the wait; waits with the same key take about the same time in each step.

        Returns:
            A context manager that yields the object to poll while the host waits, or None without a turn.
        """
        holder = self._holder
        if not holder.is_wanted:
            yield None if holder.backlog is None else WaitOutsideOfTurn(holder.backlog)
            return
        gap = Gap(what, holder)
        try:
            yield gap
        except BaseException:
            self.release()  # a leg failed, or Ctrl-C: training may not go on
            raise
        gap.end()
        holder.acquire()

    def before_stream_waits(self, stream: Stream) -> None:
        """Note that the current stream is going to wait for all that is queued on ``stream`` now."""
        if self._holder.backlog is not None:
            self._holder.backlog.wait_begins(gpu.record(stream))

    def step_ended(self) -> None:
        """Account for the iteration that has ended, and start or end a break from sharing."""
        step = self.ledger.step_ended(time.perf_counter())
        # A filler takes no breaks: without the lease it would slow down the peer.
        if step is None or self._holder.lease.role == "filler":
            return
        was_sharing = self._gain.sharing
        self._gain.step(step)
        if was_sharing and not self._gain.sharing:
            self._note_fallback(
                f"gaps filled by other jobs gained less than {MIN_GAIN:.0%} of a step: the lease takes a break"
            )
            self.release()

    def stats(self) -> LeaseUse:
        """Use of the lease so far, times in seconds."""
        seen, ledger = self._holder.lease.stats(), self.ledger
        return LeaseUse(
            held_s=ledger.held_s,
            gaps=ledger.gaps,
            given_s=ledger.given_s,
            filled_s=ledger.filled_s,
            regrant_s=ledger.regrant_s,
            slowed_s=ledger.slowed_s,
            hand_offs=ledger.hand_offs,
            gain=self._gain.last,
            sharing=self._gain.sharing,
            grants=seen.grants,
            lost=seen.lost,
            unleased=seen.unleased,
        )
