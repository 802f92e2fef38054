"""The emulated device of `scripts/bench_lease.py`: who gets it and for how long, and real processes that share one."""

import math
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_lease_parts.device import DEVICE_VARIABLE, Device, DevicePace, serve_device


def run_to_the_end(device: Device) -> dict[int, float]:
    """When each kernel in the queue is done."""
    done_s = {}
    while (now_s := device.next_done_s()) < math.inf:
        done_s |= dict.fromkeys(device.advance(now_s), now_s)
    return done_s


def test_a_kernel_alone_takes_its_own_time() -> None:
    device = Device()
    device.submit(1, 0.0105, 10.0)
    assert device.advance(10.01) == []
    assert run_to_the_end(device) == {1: pytest.approx(10.0105)}


def test_equal_kernels_take_turns_and_end_together() -> None:
    device = Device()
    device.submit(1, 0.010, 0.0)
    device.submit(2, 0.010, 0.0)
    assert run_to_the_end(device) == {1: pytest.approx(0.018), 2: pytest.approx(0.020)}


def test_a_short_kernel_waits_for_a_slice_of_each_other_job() -> None:
    device = Device()
    device.submit(1, 0.1, 0.0)
    device.submit(2, 0.1, 0.0)
    device.submit(3, 0.001, 0.0001)
    assert run_to_the_end(device)[3] == pytest.approx(0.005)


kernels = st.lists(st.tuples(st.integers(0, 4), st.floats(1e-4, 0.05), st.floats(0, 0.02)), min_size=1, max_size=12)


@given(kernels)
def test_the_device_is_never_idle_while_there_is_work(arrivals: list[tuple[int, float, float]]) -> None:
    device, now_s, busy_until_s, waiting = Device(), 0.0, 0.0, set[int]()
    done: dict[int, float] = {}
    for job, kernel_s, later_s in arrivals:
        now_s += later_s
        waiting -= set(device.advance(now_s))
        if job not in waiting:
            waiting.add(job)
            device.submit(job, kernel_s, now_s)
            busy_until_s = max(busy_until_s, now_s) + kernel_s
    done = run_to_the_end(device)
    assert set(done) == waiting
    if done:
        assert max(done.values()) == pytest.approx(busy_until_s)


def compute_for_a_while(device_fd: int, kernel_s: float, start_s: float, end_s: float, answer: Connection) -> None:
    os.environ[DEVICE_VARIABLE] = str(device_fd)
    pace = DevicePace(0.0)
    kernels = 0
    time.sleep(max(0.0, start_s - time.monotonic()))
    while time.monotonic() < end_s:
        pace.spend(kernel_s)
        kernels += 1
    answer.send(kernels)


def run_processes(kernels_s: list[float], seconds: float) -> list[float]:
    """Processes that share a device; the device time that each of them got."""
    start_s = time.monotonic() + 0.2
    device_ends, processes, answers = [], [], []
    for kernel_s in kernels_s:
        device_end, job_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, theirs = multiprocessing.Pipe()
        processes.append(started(compute_for_a_while, job_end.fileno(), kernel_s, start_s, start_s + seconds, theirs))
        device_ends.append(device_end)
        answers.append(ours)
        job_end.close()
    server = started(serve_device, device_ends)
    for device_end in device_ends:
        device_end.close()
    for process in [*processes, server]:
        process.join(30)
        assert process.exitcode == 0
    return [kernel_s * answer.recv() for kernel_s, answer in zip(kernels_s, answers, strict=True)]


def started(target: Callable[..., None], *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    process.start()
    return process


@pytest.mark.timeout(240)
def test_processes_get_equal_shares_whatever_their_kernels() -> None:
    short_s, long_s = run_processes([0.010, 0.030], seconds=1.5)
    assert short_s == pytest.approx(long_s, rel=0.25)
    # Together no more than there is, and a last kernel each that began in time and ended late.
    assert short_s + long_s <= 1.5 + 0.08
