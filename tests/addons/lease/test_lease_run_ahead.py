"""How much a filler's host queues. On a thread that does what it is given, in order, as a GPU does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from ddp_crossover.addons.lease.client import GpuLease
from ddp_crossover.addons.lease.client.instrument import Instrument, RunAhead

LIMIT_S = 0.004
KERNEL_S = 0.001
KERNELS = 12


class Device:
    """Runs kernels on a thread. Its clock counts what they are said to take, so that a busy machine changes nothing."""

    def __init__(self) -> None:
        self.clock_s = 0.0
        self.queued_s = 0.0
        self._work: queue.SimpleQueue[float | Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def launch(self, kernel_s: float) -> None:
        with self._lock:
            self.queued_s += kernel_s
        self._work.put(kernel_s)

    def record(self, event: Event) -> None:
        self._work.put(event)

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, Event):
                work.at_s = self.clock_s
                work.done.set()
            else:
                time.sleep(work)
                with self._lock:
                    self.clock_s += work
                    self.queued_s -= work


class Event:
    """Recorded when it is made."""

    def __init__(self, device: Device) -> None:
        self.done = threading.Event()
        self.at_s = 0.0
        device.record(self)

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        assert self.done.wait(20)

    def elapsed_time(self, end_event: Event) -> float:
        assert self.query() and end_event.query()  # as CUDA demands
        return 1e3 * (end_event.at_s - self.at_s)


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.end()


def wait_for(device: Device) -> None:
    Event(device).synchronize()


def _pass(device: Device, ahead: RunAhead, kernels_s: list[float]) -> list[float]:
    """Launch kernels with a mark after each; what is queued when each mark returns, in seconds of device time."""
    queued_s = []
    ahead.restart()
    for point, kernel_s in enumerate(kernels_s):
        device.launch(kernel_s)
        ahead.mark(point)
        queued_s.append(device.queued_s)
    return queued_s


def test_the_host_runs_ahead_up_to_the_limit(device: Device) -> None:
    ahead = RunAhead(LIMIT_S, lambda: Event(device))
    _pass(device, ahead, [KERNEL_S] * KERNELS)
    queued_s = [q for _ in range(3) for q in _pass(device, ahead, [KERNEL_S] * KERNELS)]
    assert max(queued_s) <= LIMIT_S + 1e-9
    assert max(queued_s) > LIMIT_S - 2 * KERNEL_S


def test_what_has_never_been_measured_is_not_queued_behind_more_of_it(device: Device) -> None:
    ahead = RunAhead(LIMIT_S, lambda: Event(device))
    assert max(_pass(device, ahead, [3 * LIMIT_S] * 3)) <= 3 * LIMIT_S + 1e-9


def test_work_that_is_longer_than_the_limit_is_waited_for(device: Device) -> None:
    ahead = RunAhead(LIMIT_S, lambda: Event(device))
    kernels_s = [KERNEL_S, 2 * LIMIT_S, KERNEL_S]
    _pass(device, ahead, kernels_s)
    assert _pass(device, ahead, kernels_s)[1] == pytest.approx(0)


def test_work_that_has_become_longer_is_noticed(device: Device) -> None:
    ahead = RunAhead(LIMIT_S, lambda: Event(device))
    _pass(device, ahead, [KERNEL_S / 10] * KERNELS)
    _pass(device, ahead, [KERNEL_S] * KERNELS)
    wait_for(device)
    assert max(_pass(device, ahead, [KERNEL_S] * KERNELS)) <= LIMIT_S + 1e-9


def test_what_an_earlier_turn_has_left_is_counted(device: Device) -> None:
    ahead = RunAhead(LIMIT_S, lambda: Event(device))
    for _ in range(5):
        queued_s = _pass(device, ahead, [KERNEL_S] * 3)
        assert max(queued_s) <= LIMIT_S + 1e-9


def test_the_time_of_another_job_in_between_is_not_counted(device: Device) -> None:
    ahead = RunAhead(LIMIT_S, lambda: Event(device))
    _pass(device, ahead, [KERNEL_S] * KERNELS)
    for _ in range(3):
        device.launch(5 * LIMIT_S)  # another job's
        queued_s = _pass(device, ahead, [KERNEL_S] * KERNELS)
    assert max(queued_s[KERNELS // 2 :]) > LIMIT_S - 2 * KERNEL_S


def test_an_instrumented_model_keeps_to_it(device: Device, lease: GpuLease) -> None:
    queued_s = []

    class Kernel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            queued_s.append(device.queued_s)
            device.launch(KERNEL_S)
            return x

    model = nn.Sequential(*(Kernel() for _ in range(KERNELS)))
    with Instrument(lease, model, None, 1.0, RunAhead(LIMIT_S, lambda: Event(device))):
        for _ in range(3):
            model(torch.zeros(1))
    assert max(queued_s) <= LIMIT_S + 1e-9
    assert max(queued_s) > LIMIT_S - 2 * KERNEL_S
