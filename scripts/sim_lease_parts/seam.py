"""The simulated GPU and its time in the place of what the package calls: streams, events and the clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from bench_kit.virtual_clock import HostClock
from ddp_crossover import device
from ddp_crossover.addons.lease.client import instrument
from ddp_crossover.addons.lease.sharing import forward_times, gap, held_forward, lease_holder, turns
from sim_lease_parts.gpu import Gpu, Process, Sharing, Stream
from sim_lease_parts.hosts import Hosts

DEVICE = torch.device("cpu")


class SimEvent:
    """As an event of CUDA."""

    def __init__(self, stream: SimStream, *, timed: bool = False, awaited: bool = False) -> None:
        self.event = stream.stream.record()
        self._hosts = stream.hosts

    def query(self) -> bool:
        return self.event.at_s is not None

    def synchronize(self) -> None:
        self._hosts.sleep_until(self.event)

    def elapsed_time(self, end: SimEvent) -> float:
        return seconds_between(self, end) * 1e3


def seconds_between(begin: SimEvent, end: SimEvent) -> float:
    """As the function of the package."""
    assert begin.event.at_s is not None and end.event.at_s is not None
    return end.event.at_s - begin.event.at_s


class SimStream:
    """As a stream of CUDA."""

    device = DEVICE

    def __init__(self, hosts: Hosts, stream: Stream) -> None:
        self.hosts = hosts
        self.stream = stream

    def wait_event(self, event: SimEvent) -> None:
        self.stream.wait(event.event)

    def wait_stream(self, other: SimStream) -> None:
        self.stream.wait(other.stream.record())


class World:
    """A GPU, its hosts, and which stream is current on each.

    Args:
        sharing: how processes share the GPU.
    """

    def __init__(self, sharing: Sharing) -> None:
        self.gpu = Gpu(sharing)
        self.hosts = Hosts(self.gpu)
        self._current = threading.local()

    def begin_process(self, width: float = 1.0) -> tuple[Process, SimStream]:
        """A process on the GPU for the calling thread, with its compute stream as the current one."""
        process = self.gpu.process(width)
        self._current.stream = stream = SimStream(self.hosts, process.stream())
        return process, stream

    def wire(self, process: Process) -> SimStream:
        """A stream for the legs of a process."""
        return SimStream(self.hosts, self.gpu.wire(process))

    def current_stream(self, of: Any = None) -> SimStream:
        stream: SimStream = self._current.stream
        return stream

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the package sees this world."""
        clock = HostClock(self.hosts)
        replacements: list[tuple[Any, str, Any]] = [
            (device, "current_stream", self.current_stream),
            (device, "record", SimEvent),
            (device, "seconds_between", seconds_between),
            *(
                (module, "time", clock)
                for module in (forward_times, gap, held_forward, lease_holder, turns, instrument)
            ),
        ]
        with ExitStack() as stack:
            for owner, name, replacement in replacements:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield
