"""A turn lasts until the GPU has done what was queued in it, and the host does not wait for that. On made-up events."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from ddp_crossover import device as gpu
from ddp_crossover.addons.lease.client import GpuLease
from lease_processes import Actor, LeaseProcesses, eventually

GPU = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture
def lease(processes: LeaseProcesses, make_lease: Callable[..., GpuLease]) -> GpuLease:
    processes.broker()
    return make_lease(GPU)


class Event:
    """The device gets to it when the test says so."""

    def __init__(self, stream: object) -> None:
        self.stream = stream
        self.has_happened = False
        self.error = ""

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.has_happened


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """All events that were recorded."""
    seen: list[Event] = []

    def record(stream: object, **options: bool) -> Event:
        seen.append(Event(stream))
        return seen[-1]

    monkeypatch.setattr(gpu, "is_in_use", lambda: True)
    monkeypatch.setattr(gpu, "current_stream", lambda: "the current one")
    monkeypatch.setattr(gpu, "record", record)
    return seen


def waits_for(lease: GpuLease, processes: LeaseProcesses, **options: str) -> Actor:
    """A job that waits for what `lease` holds."""
    waiter = processes.actor("waiter", resource=GPU, **options)
    waiter.start("hold_for", 0.0)
    eventually(lambda: lease.contended)
    return waiter


@pytest.fixture
def waiter(processes: LeaseProcesses, lease: GpuLease) -> Actor:
    """Waits for what `lease` holds."""
    lease.acquire()
    return waits_for(lease, processes)


def test_the_next_job_waits_for_the_device_and_the_host_does_not(lease, waiter, events) -> None:
    lease.release()
    assert not lease.holding
    assert [event.stream for event in events] == ["the current one"]
    time.sleep(0.05)
    assert not waiter.has_answered()
    before_s = time.perf_counter()
    events[0].has_happened = True
    assert waiter.result()["leased"]
    assert lease.released_s > before_s


def test_the_stream_may_be_named_and_where_nothing_is_held_none_is_drained(lease, events) -> None:
    lease.release()
    assert events == []
    lease.acquire()
    lease.release("a stream")
    assert [event.stream for event in events] == ["a stream"]


def test_where_nobody_waits_the_next_turn_is_the_last_one_gone_on(lease, events) -> None:
    lease.acquire()
    for _ in range(3):
        fence = lease.fence
        lease.release()
        assert lease.acquire() and lease.fence == fence
    assert lease.stats().grants == 1
    lease.release()
    events[-1].has_happened = True
    eventually(lambda: lease.released_s > 0)
    assert lease.acquire() and lease.fence > fence
    assert lease.stats().grants == 2


def test_where_another_job_waits_it_comes_before_the_next_turn(lease, waiter, events) -> None:
    lease.release()
    threading.Timer(0.05, lambda: setattr(events[0], "has_happened", True)).start()
    assert lease.acquire()
    assert events[0].has_happened
    assert waiter.result()["fence"] < lease.fence


def test_a_job_that_comes_while_the_device_works_waits_for_it(lease, events, processes) -> None:
    lease.acquire()
    lease.release()
    waiter = waits_for(lease, processes)
    time.sleep(0.05)
    assert not waiter.has_answered()
    events[0].has_happened = True
    assert waiter.result()["leased"]


def test_what_is_done_already_ends_the_turn_at_once(lease, events, monkeypatch) -> None:
    monkeypatch.setattr(Event, "query", lambda event: True)
    lease.acquire()
    before_s = time.perf_counter()
    lease.release()
    assert lease.released_s >= before_s


def test_a_turn_is_yielded_when_the_stream_has_drained(lease, waiter, events) -> None:
    threading.Timer(0.05, lambda: setattr(events[0], "has_happened", True)).start()
    assert lease.yield_turn()
    assert events[0].has_happened
    assert waiter.result()["leased"]


def test_without_a_waiter_a_turn_is_not_yielded(lease, events) -> None:
    lease.acquire()
    assert lease.yield_turn()
    assert events == []
    assert lease.holding


def test_an_error_of_an_earlier_kernel_does_not_keep_the_lease(lease, waiter, events) -> None:
    lease.release()
    events[0].error = "CUDA error: an illegal memory access was encountered"
    assert waiter.result()["leased"]


def test_a_process_that_has_not_used_the_gpu_has_nothing_to_drain(lease, waiter, events, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "is_in_use", lambda: False)
    lease.release()
    assert events == []
    assert waiter.result()["leased"]


def test_a_lease_that_is_closed_or_dropped_meanwhile_leaves_nothing(lease, waiter, events) -> None:
    lease.release()
    lease.close()
    assert waiter.result()["leased"]
    assert lease.acquire() is False


def test_its_thread_keeps_no_lease_alive(processes, lease_directory, events) -> None:
    processes.broker()
    lease = GpuLease(GPU, job="job", directory=lease_directory, spawn_broker=False)
    assert lease.wait_until_connected(20)
    lease.acquire()
    lease.release()
    reference = weakref.ref(lease)
    del lease
    gc.collect()
    eventually(lambda: reference() is None)
    eventually(lambda: not any(thread.name == "ddp_crossover-lease-drain" for thread in threading.enumerate()))


def test_blocks_that_begin_while_a_turn_ends_release_what_they_acquire(lease, events, processes, monkeypatch) -> None:
    draw = random.Random(1)

    def soon(event: Event) -> bool:
        if not hasattr(event, "ends_s"):
            event.ends_s = time.perf_counter() + draw.uniform(0, 2e-3)
        return time.perf_counter() >= event.ends_s

    monkeypatch.setattr(Event, "query", soon)
    for _ in range(500):
        with lease.held():
            pass
        assert not lease.holding
        time.sleep(draw.uniform(0, 2e-3))
    filler = processes.actor("filler", resource=GPU, role="filler")
    filler.start("hold_for", 0.0)
    assert filler.result()["leased"]


def test_its_own_work_is_not_waited_for_beyond_the_limit(processes, make_lease, events) -> None:
    processes.broker()
    lease = make_lease(GPU, max_wait_s=0.2)
    lease.acquire()
    waits_for(lease, processes, role="filler")
    lease.release()
    assert not lease.acquire()
    assert lease.stats().unleased == {"its own work on the device was not done within 0.2 s": 1}


def test_a_turn_that_the_broker_ends_meanwhile_has_ended(processes, make_lease, events) -> None:
    processes.broker(limits={"hold_s": 0.3})
    lease = make_lease(GPU)
    lease.acquire()
    waits_for(lease, processes)
    lease.release()
    before_s = time.perf_counter()
    assert lease.acquire()
    assert lease.released_s > before_s
