"""The emulated device of a host as a process that its jobs submit kernels to.

A kernel costs one message each way, however many jobs use the device: slices are arithmetic on the server's
side. Submitting blocks the thread that submits, without the GIL and without using the core.
"""

import contextlib
import os
import select
import socket
import struct
import time

from bench_kit.paced import Pace, sleep_accurately
from bench_lease_parts.device import Device

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


def serve_device(jobs: list[socket.socket], slice_s: float, switch_s: float) -> None:
    """Be the device until the last job has hung up.

    Args:
        jobs: the device's ends of the jobs' connections, of type SOCK_SEQPACKET.
        slice_s: see `Device`.
        switch_s: see `Device`.
    """
    sleep_accurately()
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # a device does not wait for a core of its host
    device = Device(slice_s, switch_s)
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
