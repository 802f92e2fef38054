"""Holds a model's lease while its training computes, and releases it while training waits for communication.

This module knows the lease but not DDP. Problems with the lease never stop training, so nothing is raised here for
them. Without a lease every method returns at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator
from typing import Protocol

from ddp_crossover.collectives.leg import HostWait
from ddp_crossover.gpu_sharing.gap_policy import MIN_GAIN, ExpectedWaits, Gain
from ddp_crossover.lease.client import GpuLease
from ddp_crossover.stats import FallbackLog, LeaseUse
from ddp_crossover.tracing.clock import CommClock

# Polling interval during a wait, which is also the longest delay of a job that asks for the lease meanwhile. Each poll
# costs about 10 us of an idle core.
_LOOK_S = 1e-3
_CONNECT_S = 1.0


class ComputeTimes(Protocol):
    """The part of ``ComputeProfiler`` that is used here."""

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Exclude the block from compute time, because compute waits for communication in it."""


class Turns:
    """Takes turns on the device with other jobs.

    Args:
        lease: the lease, or None to compute without turns.
        clock: records turns while a trace is taken.
        fallbacks: records when sharing did not pay.

    Attributes:
        profiler: told of time that is not compute, while compute times are measured; else None.
        disturbances: how often another job has wanted or held the device so far.
    """

    def __init__(self, lease: GpuLease | None, clock: CommClock, fallbacks: FallbackLog) -> None:
        if lease is not None and not isinstance(lease, GpuLease):
            raise TypeError(f"lease must be a ddp_crossover.GpuLease, got {type(lease).__name__}")
        self.profiler: ComputeTimes | None = None
        self.disturbances = 0
        self._lease = lease
        self._clock = clock
        self._fallbacks = fallbacks
        self._expected = ExpectedWaits()
        self._gain = Gain()
        self._wanted = False
        # The present turn: when it was granted, and how long it had to wait for another job.
        self._granted_s: float | None = None
        self._late_s = 0.0
        # Sums in seconds, counts, and their values at the end of the last step.
        self._held_s = self._given_s = self._filled_s = self._regrant_s = self._slowed_s = 0.0
        self._gaps = self._hand_offs = 0
        self._at_step: tuple[float, float, float, int] | None = None
        if lease is not None:
            # Otherwise the first turns would run unleased, before the client has connected.
            lease.wait_until_connected(_CONNECT_S)

    # Called by training where compute begins, ends or waits.

    def want(self) -> None:
        """Ask for a turn: it begins at the next :meth:`resume`, or after the next wait."""
        self._wanted = self._lease is not None and self._gain.sharing

    def resume(self) -> None:
        """Acquire the lease before compute, if a turn is wanted and the lease is not held."""
        if self._wanted and not self._holding:
            with self.profiler.waiting() if self.profiler is not None else contextlib.nullcontext():
                self._acquire()

    def release(self) -> None:
        """End the turn, because no compute follows until the next :meth:`want`."""
        self._wanted = False
        self._give()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Release the lease around a blocking exchange between ranks."""
        wanted = self._wanted
        self.release()
        yield
        if wanted:
            self.want()
            self.resume()

    @contextlib.contextmanager
    def gap(self, what: Hashable) -> Iterator[HostWait | None]:
        """Wrap a wait of compute for communication. Gives the lease away if another job wants it and the wait is long.

        Args:
            what: key of the wait; waits with the same key take about the same time in each step.

        Returns:
            A context manager that yields the callback to poll while the host waits, or None without a turn.
        """
        with self.profiler.waiting() if self.profiler is not None else contextlib.nullcontext():
            if self._lease is None or not self._wanted:
                yield None
                return
            gap = _Gap(self, self._lease, what)
            try:
                yield gap
            except BaseException:
                self.release()  # a leg failed, or Ctrl-C: training may not go on
                raise
            gap.end()
            if self._wanted and not self._holding:
                self._acquire()

    def step_ended(self) -> None:
        """Account for the iteration that has ended, and start or end a break from sharing."""
        if self._lease is None:
            return
        now_s = time.perf_counter()
        was_sharing = self._gain.sharing
        if self._at_step is not None:
            since_s, filled_s, slowed_s, disturbances = self._at_step
            self._gain.step(
                now_s - since_s,
                self._filled_s - filled_s,
                self._slowed_s - slowed_s,
                # A filler takes no breaks: without the lease it would slow down the peer.
                contended=self.disturbances > disturbances and self._lease.role == "peer",
            )
            if was_sharing and not self._gain.sharing:
                self._fallbacks.note(
                    f"gaps filled by other jobs gained less than {MIN_GAIN:.0%} of a step: the lease takes a break"
                )
                self.release()
        self._at_step = (now_s, self._filled_s, self._slowed_s, self.disturbances)

    def stats(self) -> LeaseUse | None:
        """Use of the lease so far, times in seconds; None without a lease."""
        if self._lease is None:
            return None
        seen = self._lease.stats()
        return LeaseUse(
            held_s=self._held_s,
            gaps=self._gaps,
            given_s=self._given_s,
            filled_s=self._filled_s,
            regrant_s=self._regrant_s,
            slowed_s=self._slowed_s,
            hand_offs=self._hand_offs,
            gain=self._gain.last,
            sharing=self._gain.sharing,
            grants=seen.grants,
            lost=seen.lost,
            unleased=seen.unleased,
        )

    # Holding the lease.

    @property
    def _holding(self) -> bool:
        return self._granted_s is not None and self._lease is not None and self._lease.holding

    def _acquire(self) -> None:
        lease = self._lease
        assert lease is not None
        self._end_turn(time.perf_counter())  # the broker may have ended the last turn
        was_taken = lease.taken
        start_s = time.perf_counter()
        granted = lease.acquire(eager=True)
        now_s = time.perf_counter()
        self._late_s = now_s - start_s if was_taken else 0.0
        self._regrant_s += now_s - start_s
        if was_taken:
            self.disturbances += 1
        elif granted:
            self._expected.note_acquire(now_s - start_s)
        if granted:
            self._granted_s = now_s
        else:
            self._wanted = False  # do not ask again before the next want()
            self._slowed_s += self._late_s
        if self._clock.trace is not None:
            self._clock.trace.add("lease_wait", start_s, now_s, detail=lease.job)

    def _give(self) -> None:
        if self._granted_s is None:
            return
        lease = self._lease
        assert lease is not None
        contended = lease.contended
        self._hand_offs += contended
        self.disturbances += contended
        start_s = time.perf_counter()
        lease.release()
        now_s = time.perf_counter()
        if not contended:  # otherwise it includes draining the stream, which is compute
            self._expected.note_release(now_s - start_s)
        self._end_turn(now_s)

    def _end_turn(self, now_s: float) -> None:
        if self._granted_s is None:
            return
        held_s = now_s - self._granted_s
        self._held_s += held_s
        self._slowed_s += max(0.0, self._late_s - held_s)
        if self._clock.trace is not None and self._lease is not None:
            self._clock.trace.add("held", self._granted_s, now_s, detail=self._lease.job)
        self._granted_s = None


class _Gap:
    """One wait of compute for communication."""

    def __init__(self, turns: Turns, lease: GpuLease, what: Hashable) -> None:
        self._turns = turns
        self._lease = lease
        self._what = what
        self._began_s: float | None = None
        self._free_since_s: float | None = None
        self._looked_s = 0.0
        self._handed_over = False
        self._is_unknown = False
        self._filled_s = 0.0

    def is_worth_blocking(self) -> bool:
        """Whether to block the host on CUDA, where a stream could wait alone: only if another job wants the device."""
        turns = self._turns
        worth = turns._holding and self._lease.contended and turns._expected.is_worth_trying(self._what)
        self._is_unknown = not worth
        return worth

    def poll(self) -> float:
        """Poll while the host waits: give the turn away if that pays now. Returns seconds until the next poll."""
        turns, now_s = self._turns, time.perf_counter()
        if self._began_s is None:
            self._began_s = now_s
            if not turns._holding:  # the turn has not begun
                self._free_since_s = self._looked_s = now_s
        if self._free_since_s is not None:
            self._sample(now_s)
        elif self._lease.contended and turns._expected.is_worth_giving(self._what, now_s - self._began_s):
            turns._give()
            self._handed_over = True
            self._free_since_s = self._looked_s = time.perf_counter()
        return _LOOK_S

    def _sample(self, now_s: float) -> None:
        if self._lease.taken:
            self._filled_s += now_s - self._looked_s
        self._looked_s = now_s

    def end(self) -> None:
        """Account for the wait, which is over."""
        turns, now_s = self._turns, time.perf_counter()
        if not self._is_unknown:
            turns._expected.note(self._what, 0.0 if self._began_s is None else now_s - self._began_s)
        if self._free_since_s is None:
            return
        self._sample(now_s)
        if self._handed_over or self._filled_s:
            turns._gaps += 1
            turns._given_s += now_s - self._free_since_s
            turns._filled_s += self._filled_s
            turns.disturbances += 1
            if turns._clock.trace is not None:
                turns._clock.trace.add("gap", self._free_since_s, now_s, detail=self._lease.job)
