"""Holds the lease: acquires it for a turn, gives it back, and notes in the ledger what that cost.

What the device still has to do for this job is seen without waiting for it. The ledger only adds up: no clock, no
lease, no decisions.
"""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from ddp_crossover import device as gpu
from ddp_crossover.addons.lease.client import GpuLease
from ddp_crossover.addons.lease.sharing.gap_policy import ExpectedWaits, StepFigures
from ddp_crossover.comm.stream_order import CudaStreams
from ddp_crossover.report.clock import CommClock


class Ledger:
    """Sums since attach; what the attributes mean stands at :class:`ddp_crossover.report.stats.LeaseUse`.

    Attributes:
        disturbances: how often another job has wanted or held the device so far.
    """

    def __init__(self) -> None:
        self.held_s = self.given_s = self.filled_s = self.regrant_s = 0.0
        self.gaps = self.hand_offs = self.disturbances = 0
        # When the last step ended, and regrant_s and disturbances at that time.
        self._last_step: tuple[float, float, int] | None = None

    def hand_over(self) -> None:
        """Note that the lease was given up while another job waited for it."""
        self.hand_offs += 1
        self.disturb()

    def disturb(self) -> None:
        """Note that another job has wanted or held the device."""
        self.disturbances += 1

    def wait_for_grant(self, waited_s: float) -> None:
        self.regrant_s += waited_s

    def turn_ended(self, held_s: float) -> None:
        self.held_s += held_s

    def gap_ended(self, given_s: float, filled_s: float) -> None:
        """Note a gap: for how long the lease was free, and for how long another job has held it meanwhile."""
        self.gaps += 1
        self.given_s += given_s
        self.filled_s += filled_s
        self.disturb()

    def step_ended(self, now_s: float) -> StepFigures | None:
        """Return the figures since the last step ended; None for the first step."""
        before, self._last_step = self._last_step, (now_s, self.regrant_s, self.disturbances)
        if before is None:
            return None
        since_s, regrant_s, disturbances = before
        return StepFigures(now_s - since_s, self.regrant_s - regrant_s, self.disturbances > disturbances)


# A stream that stands at a leg for longer may do so until another job has had its turn: the leg may need a peer that
# waits for one. Before that, what is queued behind the leg goes on by itself at any moment.
_STANDS_S = 2e-3


class _OpenWait(NamedTuple):
    """A wait that was queued: `before` happens when the stream gets to it, `done` when the leg has ended."""

    before: gpu.Event
    done: gpu.Event


class Backlog:
    """Looks at events of the compute stream; blocks nowhere.

    A stream stands still at the oldest wait whose leg has not ended, once it has got there.

    Args:
        streams: the streams of the device.
    """

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._waits: deque[_OpenWait] = deque()
        self._standing: _OpenWait | None = None
        self._standing_since_s = 0.0
        self._lock = threading.RLock()  # reentrant: a signal handler may wait for legs

    def wait_begins(self, done: gpu.Event) -> None:
        """Note that the current stream is going to wait for ``done``."""
        wait = _OpenWait(gpu.record(self._streams.current()), done)
        with self._lock:
            self._waits.append(wait)
            self._drop_ended()

    def stands_at_last_wait(self) -> bool:
        """Whether the device waits for a leg, and no other wait is queued behind that."""
        with self._lock:
            self._drop_ended()
            return len(self._waits) == 1 and bool(self._waits[0].before.query())

    def stands_for_long(self) -> bool:
        """Whether the device has been seen waiting for one leg for 2 ms, whatever is queued behind it."""
        now_s = time.perf_counter()
        with self._lock:
            self._drop_ended()
            oldest = self._waits[0] if self._waits and self._waits[0].before.query() else None
            if oldest is not self._standing:
                self._standing, self._standing_since_s = oldest, now_s
            return oldest is not None and now_s - self._standing_since_s >= _STANDS_S

    def end(self) -> Callable[[], bool]:
        """A function for any thread: whether the device has done what is queued now, or stands still before that.

        If it waits for a leg for long, the turn must end, too, see :data:`_STANDS_S`.
        """
        try:
            last = gpu.record(self._streams.current())
        except RuntimeError:  # of an earlier kernel: CUDA raises it again in the job's own next call
            return lambda: True

        def is_drained() -> bool:
            try:
                return last.query() or self.stands_for_long()
            except RuntimeError:
                return True

        return is_drained

    def _drop_ended(self) -> None:
        while self._waits and (oldest := self._waits[0]).done.query():
            if self._waits and self._waits[0] is oldest:  # else a signal handler has dropped it meanwhile
                self._waits.popleft()


_DEFAULT_DIRECTORY = "/tmp/nvidia-mps"

WITHOUT_MPS = (
    "without NVIDIA's MPS the kernels of NCCL, which spin while they wait for other ranks, share the GPU with another "
    "job in slices, so that job gets about half of each gap: start nvidia-cuda-mps-control -d before the jobs, or let "
    'legs travel over gloo with process_group=dist.new_group(backend="gloo")'
)


def mps_runs(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether there is a control daemon in whose directory this process would look for one.

    Source: NVIDIA's Multi-Process Service, "Environment variables".
    """
    control = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", _DEFAULT_DIRECTORY), "control")
    try:
        mode = control.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


# A job that waits for communication neither holds the lease nor asks for it: it is remembered for a few steps.
_REMEMBER_S = 1.0


class LeaseHolder:
    """One job's turns on its device, one after the other.

    Args:
        lease: the lease.
        clock: records turns while a trace is taken.
        ledger: adds up what turns cost.
        backlog: what the device has still to do; None on a CPU, where all is done when the host says so.

    Attributes:
        expected: predicts how long waits will be, and learns what a hand-off costs.
        is_wanted: whether compute wants a turn now, or after the present wait.
    """

    def __init__(self, lease: GpuLease, clock: CommClock, ledger: Ledger, backlog: Backlog | None) -> None:
        self.lease = lease
        self.clock = clock
        self.ledger = ledger
        self.backlog = backlog
        self.expected = ExpectedWaits()
        self.is_wanted = False
        # When the present turn was granted.
        self._granted_s: float | None = None
        self._others_seen_s = -math.inf
        # When the host left the present turn, which the device has not finished.
        self._left_s: float | None = None

    def want(self, is_wanted: bool) -> None:
        self.is_wanted = is_wanted

    @property
    def is_holding(self) -> bool:
        """Whether a turn has begun, and neither the host nor the broker has ended it."""
        return self._granted_s is not None and self._left_s is None and self.lease.holding

    def has_seen_others(self) -> bool:
        """Whether another job wants or has the device, or did so in the last second."""
        now_s = time.perf_counter()
        if self.lease.contended or self.lease.taken:
            self._others_seen_s = now_s
        return now_s - self._others_seen_s < _REMEMBER_S

    def acquire(self) -> None:
        """Begin a turn if one is wanted and none is held. If the lease cannot be had, compute runs without it."""
        if not self.is_wanted or self.is_holding:
            return
        lease, ledger = self.lease, self.ledger
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
        ledger.wait_for_grant(now_s - start_s)
        if was_taken:
            ledger.disturb()
        elif granted:
            self.expected.note_acquire(now_s - start_s)
        if granted:
            self._granted_s = now_s
        else:
            self.is_wanted = False  # do not ask again before the next turn is wanted
        if self.clock.trace is not None:
            self.clock.trace.add("lease_wait", start_s, now_s, detail=lease.job)

    def release(self) -> None:
        """End the turn, if there is one; on a GPU it ends when the device has done what was queued in it."""
        if self._granted_s is None or self._left_s is not None:
            return
        contended = self.lease.contended
        if contended:
            self.ledger.hand_over()
        start_s = time.perf_counter()
        self.lease.release_when(None if self.backlog is None else self.backlog.end())
        if self.lease.draining:
            self._left_s = start_s
            return
        now_s = time.perf_counter()
        if not contended:  # otherwise it includes waking another job
            self.expected.note_release(now_s - start_s)
        self._end_turn(now_s)

    def _end_turn(self, now_s: float) -> None:
        if self._granted_s is None:
            return
        self.ledger.turn_ended(now_s - self._granted_s)
        if self.clock.trace is not None:
            self.clock.trace.add("held", self._granted_s, now_s, detail=self.lease.job)
        self._granted_s = self._left_s = None
