"""Another job on this rank's device, as a process: it takes turns, and training beside it has a lease."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from ddp_crossover import GpuLease

CONNECT_S = 30.0
# Holds and pauses for a millisecond each, until the end of its input.
_TURNS = """
import select, sys, time
from ddp_crossover.addons.lease.client import GpuLease

lease = GpuLease(sys.argv[1], job="other", directory=sys.argv[2])
while not select.select([sys.stdin], [], [], 1e-3)[0]:
    with lease.held():
        time.sleep(1e-3)
"""
_numbers = itertools.count()


@contextmanager
def shared_device() -> Iterator[GpuLease]:
    """A lease on a device that another job uses, too."""
    from ddp_crossover import GpuLease

    resource = f"cpu:{dist.get_rank()}"
    lease = GpuLease(resource, job=f"program-{next(_numbers)}", directory=_neighbour(resource))
    try:
        assert lease.wait_until_connected(CONNECT_S)
        yield lease
    finally:
        lease.close()


@functools.cache
def _neighbour(resource: str) -> str:
    """The other job's directory. It is there until this process ends, for all programs of this rank."""
    directory = tempfile.mkdtemp(prefix="fuzz-lease-")
    subprocess.Popen([sys.executable, "-c", _TURNS, resource, directory], stdin=subprocess.PIPE)
    return directory
