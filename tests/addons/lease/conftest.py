"""Fixtures of the lease's tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_crossover.addons.lease.client import GpuLease
from lease_processes import Actor, LeaseProcesses, eventually


@pytest.fixture
def lease_directory() -> Iterator[Path]:
    # Not tmp_path: the path of a socket has at most 107 bytes. mkdtemp makes it 0700.
    directory = Path(tempfile.mkdtemp(prefix="lease-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def processes(lease_directory: Path) -> Iterator[LeaseProcesses]:
    made = LeaseProcesses(lease_directory)
    yield made
    made.end()


@pytest.fixture
def pair(processes: LeaseProcesses) -> tuple[Actor, Actor]:
    """A job that holds, and one that waits for as long as it takes."""
    processes.broker()
    holder, waiter = processes.actor("holder"), processes.actor("waiter", max_wait_s=1000)
    assert holder.call("acquire")
    waiter.start("acquire")
    eventually(lambda: holder.call("get", "contended"))
    assert not waiter.has_answered()
    return holder, waiter


@pytest.fixture
def make_lease(lease_directory: Path) -> Iterator[Callable[..., GpuLease]]:
    """Makes a lease in this process. It is patient and, unless `connects` is False, connected to the broker."""
    made: list[GpuLease] = []

    def make(resource: str = "cpu:0", *, connects: bool = True, **options: Any) -> GpuLease:
        defaults = {"job": "here", "directory": lease_directory, "spawn_broker": False, "max_stall_s": 10.0}
        lease = GpuLease(resource, **(defaults | options))
        made.append(lease)
        assert not connects or lease.wait_until_connected(20)
        return lease

    yield make
    for lease in made:
        lease.close()


@pytest.fixture
def lease(processes: LeaseProcesses, make_lease: Callable[..., GpuLease]) -> GpuLease:
    """A lease in this process, and a broker."""
    processes.broker()
    return make_lease()
