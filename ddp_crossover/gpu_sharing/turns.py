"""Holds a model's lease while its training computes, and releases it while training waits for communication.

This module knows the lease but not DDP. Problems with the lease never stop training, so nothing is raised here for
them. Without a lease every method returns at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from ddp_crossover import device as gpu
from ddp_crossover.collectives.leg import HostWait
from ddp_crossover.collectives.stream_order import CudaStreams
from ddp_crossover.device import Stream
from ddp_crossover.figures.stats import LeaseUse
from ddp_crossover.gpu_sharing.gap import Gap, WaitOutsideOfTurn
from ddp_crossover.gpu_sharing.gap_policy import MIN_GAIN, Gain
from ddp_crossover.gpu_sharing.lease_holder import Backlog, LeaseHolder, Ledger
from ddp_crossover.lease.client import GpuLease
from ddp_crossover.tracing.clock import CommClock

_CONNECT_S = 1.0
_NO_GAP: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class ComputeTimes(Protocol):
    """The part of ``ComputeProfiler`` that is used here."""

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Exclude the block from compute time, because compute waits for communication in it."""


class Turns:
    """Takes turns on the device with other jobs.

    Args:
        lease: the lease, or None to compute without turns.
        clock: records turns while a trace is taken.
        note_fallback: called with the reason when sharing has not paid.
        streams: the streams of the device; None on a CPU.

    Attributes:
        profiler: told of time that is not compute, while compute times are measured; else None.
        batch_times: the same for the compute time of a batch.
        ledger: figures of the turns so far.
    """

    def __init__(
        self,
        lease: GpuLease | None,
        clock: CommClock,
        note_fallback: Callable[[str], None],
        streams: CudaStreams | None = None,
    ) -> None:
        if lease is not None and not isinstance(lease, GpuLease):
            raise TypeError(f"lease must be a ddp_crossover.GpuLease, got {type(lease).__name__}")
        self.profiler: ComputeTimes | None = None
        self.batch_times: ComputeTimes | None = None
        self.ledger = Ledger()
        self._note_fallback = note_fallback
        self._gain = Gain()
        self._holder: LeaseHolder | None = None
        if lease is not None:
            backlog = None if streams is None else Backlog(streams)
            self._holder = LeaseHolder(lease, clock, self.ledger, backlog)
            # Otherwise the first turns would run unleased, before the client has connected.
            lease.wait_until_connected(_CONNECT_S)

    @property
    def disturbances(self) -> int:
        """How often another job has wanted or held the device so far."""
        return self.ledger.disturbances

    def measure(self, profiler: ComputeTimes | None) -> None:
        """Tell this profiler of time that is not compute from now on; None: nobody."""
        self.profiler = profiler

    def time_batch(self, watch: ComputeTimes | None) -> None:
        """The same for the compute time of a batch."""
        self.batch_times = watch

    # Called by training where compute begins, ends or waits.

    def want(self) -> None:
        """Ask for a turn: it begins at the next :meth:`resume`, or after the next wait."""
        if self._holder is not None:
            self._holder.want(self._gain.sharing)

    def resume(self) -> None:
        """Acquire the lease before compute, if a turn is wanted and the lease is not held."""
        holder = self._holder
        if holder is not None and holder.is_wanted and not holder.is_holding:
            with self._outside_of_compute():
                holder.acquire()

    def release(self) -> None:
        """End the turn, because no compute follows until the next :meth:`want`."""
        if self._holder is not None:
            self._holder.want(False)
            self._holder.release()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release the lease around a blocking exchange between ranks."""
        was_wanted = self._holder is not None and self._holder.is_wanted
        self.release()
        yield
        if was_wanted:
            self.want()
            self.resume()

    def gap(self, what: Hashable) -> contextlib.AbstractContextManager[HostWait | None]:
        """Wrap a wait of compute for communication. Gives the lease away if another job wants it and the wait is long.

        Args:
            what: key of the wait; waits with the same key take about the same time in each step.

        Returns:
            A context manager that yields the object to poll while the host waits, or None without a turn.
        """
        # Every wait of every step comes here, usually with neither a lease nor a profiler.
        is_needless = self._holder is None and self.profiler is None and self.batch_times is None
        return _NO_GAP if is_needless else self._gap(what)

    @contextlib.contextmanager
    def _gap(self, what: Hashable) -> Iterator[HostWait | None]:
        with self._outside_of_compute():
            holder = self._holder
            if holder is None or not holder.is_wanted:
                backlog = None if holder is None else holder.backlog
                yield None if backlog is None else WaitOutsideOfTurn(backlog)
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
        if self._holder is not None and self._holder.backlog is not None:
            self._holder.backlog.wait_begins(gpu.record(stream))

    def step_ended(self) -> None:
        """Account for the iteration that has ended, and start or end a break from sharing."""
        if self._holder is None:
            return
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

    def stats(self) -> LeaseUse | None:
        """Use of the lease so far, times in seconds; None without a lease."""
        if self._holder is None:
            return None
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

    @contextlib.contextmanager
    def _outside_of_compute(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for times in (self.profiler, self.batch_times):
                if times is not None:
                    stack.enter_context(times.waiting())
            yield
