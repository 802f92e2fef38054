"""The emulated device of a host: kernels of several jobs share it in time slices, as contexts share a GPU.

One job's kernel runs at a time. While several jobs have work, each gets a slice in turn, first come, first served;
a job that is alone keeps the device. So all of it is used whenever anybody has work, and with *n* busy jobs
each gets 1/n.

It is a process that the jobs of its host submit kernels to. A kernel costs one message each way, however many jobs use
the device: slices are arithmetic. Submitting blocks its thread, without the GIL and without using the core.
"""

import contextlib
import copy
import math
import os
import select
import socket
import struct
import time
from collections import deque

from bench_kit.paced import Pace, sleep_accurately

SLICE_S = 0.002
_DONE_S = 1e-9


class Device:
    """The queue of one device. A job has at most one kernel in it. Pure: no clock."""

    def __init__(self) -> None:
        self._turns: deque[int] = deque()  # the first one is on the device
        self._left_s: dict[int, float] = {}
        self._clock_s = 0.0
        self._last_job: int | None = None
        self._slice_left_s = SLICE_S

    def submit(self, job: int, kernel_s: float, now_s: float) -> list[int]:
        """Queue a kernel; returns the jobs whose kernels were done before, as `advance` does."""
        done = self.advance(now_s)
        assert job not in self._left_s
        self._left_s[job] = kernel_s
        self._turns.append(job)
        return done

    def advance(self, now_s: float) -> list[int]:
        """Let time pass until `now_s`; returns the jobs whose kernels are done."""
        done = []
        while self._turns and self._clock_s < now_s:
            if (job := self._run_a_piece(now_s)) is not None:
                done.append(job)
        self._clock_s = max(self._clock_s, now_s)
        return done

    def next_done_s(self) -> float:
        """When the next kernel will be done if no other comes; infinite on an idle device."""
        trial = copy.copy(self)
        trial._turns, trial._left_s = self._turns.copy(), self._left_s.copy()
        while trial._turns:
            if trial._run_a_piece(math.inf) is not None:
                return trial._clock_s
        return math.inf

    def _run_a_piece(self, until_s: float) -> int | None:
        """Go on to the next event, not past `until_s`; returns the job whose kernel is done by that."""
        job = self._turns[0]
        if job != self._last_job:
            self._last_job, self._slice_left_s = job, SLICE_S
        spent_s = min(self._left_s[job], self._slice_left_s, until_s - self._clock_s)
        self._clock_s += spent_s
        self._left_s[job] -= spent_s
        self._slice_left_s -= spent_s
        if self._left_s[job] <= _DONE_S:
            self._turns.popleft()
            del self._left_s[job]
            return job
        if self._slice_left_s <= _DONE_S:
            self._turns.rotate(-1)
            self._slice_left_s = SLICE_S
        return None


DEVICE_VARIABLE = "BENCH_DEVICE_FD"
_KERNEL = struct.Struct("dd")  # how long it takes alone, when it was submitted


class DevicePace(Pace):
    """Paced layers that spend their time on the device of this host. Made once in each job's process."""

    def __init__(self, forward_s: float) -> None:
        super().__init__(forward_s)
        self._queue = socket.socket(fileno=int(os.environ[DEVICE_VARIABLE]))

    def spend(self, seconds: float) -> None:
        """Run a kernel that would take `seconds` alone. Raises ConnectionError when the device is gone."""
        self._queue.send(_KERNEL.pack(seconds, time.monotonic()))
        if not self._queue.recv(1):
            raise ConnectionError("the device's process has ended")


def serve_device(jobs: list[socket.socket]) -> None:
    """Be the device until the last job has hung up, given its ends of the jobs' connections (SOCK_SEQPACKET)."""
    sleep_accurately()
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # a device does not wait for a core of its host
    device = Device()
    open_jobs = {job.fileno(): job for job in jobs}
    while open_jobs:
        # select, because epoll rounds its timeout up to a millisecond.
        wait_s = min(device.next_done_s() - time.monotonic(), 3600.0)
        readable, _, _ = select.select(list(open_jobs), (), (), max(0.0, wait_s))
        done = []
        for fd in readable:
            if kernel := _received(open_jobs[fd]):
                # As of when it was submitted: what the message takes is the emulation's delay, not the device's.
                done += device.submit(fd, *_KERNEL.unpack(kernel))
            else:
                open_jobs.pop(fd).close()
        for fd in done + device.advance(time.monotonic()):
            if fd in open_jobs:
                with contextlib.suppress(OSError):  # it has ended meanwhile, which the next receive tells
                    open_jobs[fd].send(b"x")


def _received(job: socket.socket) -> bytes:
    try:
        return job.recv(_KERNEL.size)
    except ConnectionError:
        return b""
