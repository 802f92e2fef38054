"""What was queued on the GPU is done before the next job gets it. On a stand-in for CUDA's events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddp_crossover.lease.client import GpuLease
from lease_processes import Actor, LeaseProcesses, eventually

GPU = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture
def lease(processes: LeaseProcesses, lease_directory: Path) -> Iterator[GpuLease]:
    processes.broker()
    lease = GpuLease(GPU, job="job", directory=lease_directory, spawn_broker=False)
    assert lease.wait_until_connected(20)
    yield lease
    lease.close()


@pytest.fixture
def events(lease: GpuLease, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was asked of CUDA's events, and whether the lease was held then."""
    seen: list[object] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            pass

        def record(self, stream: object) -> None:
            seen.append(stream)

        def synchronize(self) -> None:
            seen.append(lease.holding)
            if "broken" in seen:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return seen


@pytest.fixture
def waiter(processes: LeaseProcesses, lease: GpuLease) -> Actor:
    """Waits for what `lease` holds."""
    waiter = processes.actor("waiter", resource=GPU)
    lease.acquire()
    waiter.start("hold_for", 0.0)
    eventually(lambda: lease.contended)
    return waiter


def test_it_is_held_until_the_stream_has_drained(lease: GpuLease, waiter: Actor, events: list[object]) -> None:
    lease.release()
    assert events == [None, True]
    assert waiter.result()["leased"]


def test_the_stream_may_be_named(lease: GpuLease, waiter: Actor, events: list[object]) -> None:
    lease.release("a stream")  # type: ignore[arg-type]
    assert events == ["a stream", True]


def test_without_a_waiter_the_host_does_not_wait_for_the_gpu(lease: GpuLease, events: list[object]) -> None:
    with lease.held():
        pass
    lease.acquire()
    assert lease.yield_turn()
    assert events == []
    assert lease.holding


def test_a_turn_is_yielded_when_the_stream_has_drained(lease: GpuLease, waiter: Actor, events: list[object]) -> None:
    assert lease.yield_turn()
    assert events == [None, True]
    assert waiter.result()["leased"]


def test_an_error_of_an_earlier_kernel_does_not_keep_the_lease(
    lease: GpuLease, waiter: Actor, events: list[object]
) -> None:
    lease.release("broken")  # type: ignore[arg-type]
    assert waiter.result()["leased"]


def test_nothing_is_drained_where_nothing_was_held(lease: GpuLease, events: list[object]) -> None:
    lease.release()
    assert events == []


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="for processes that have not used CUDA")
def test_a_process_that_has_not_used_cuda_has_nothing_to_drain(lease: GpuLease, waiter: Actor) -> None:
    lease.release()
    assert waiter.result()["leased"]
    assert not torch.cuda.is_initialized()
