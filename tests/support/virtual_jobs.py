"""Jobs that train on virtual GPUs and share them by leases: real gaps, turns and NCCL legs; virtual time and broker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch

from bench_kit.virtual_clock import HostClock
from ddp_crossover import device
from ddp_crossover.addons.lease.client import GpuLease
from ddp_crossover.addons.lease.client.lease import LeaseStats
from ddp_crossover.addons.lease.sharing import forward_times, gap, held_forward, lease_holder, turns
from ddp_crossover.addons.lease.sharing.turns import Turns
from ddp_crossover.comm.stream_order import CudaStreams
from ddp_crossover.compute_waits import NoOtherJobs
from ddp_crossover.nccl.nccl_link import _NcclLeg
from ddp_crossover.report.clock import CommClock
from fake_streams import FakeEvent, FakeStream, seconds_between
from virtual_time import Hosts, Instant, Meeting

# A driver queues about a thousand kernels, which is some step.
MOST_QUEUED = 18
# As of a hand-off through the broker.
POLL_S = 1e-4
HOLD_LIMIT_S = 0.5
LAUNCH_S = 2e-5

Interval = tuple[float, float]


class VirtualGpu:
    """One device: who has its lease, and who waits for it; first come, first served."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.holder: VirtualLease | None = None
        self.queue: list[VirtualLease] = []
        self.contended_since_s = 0.0
        self.computed: dict[str, list[tuple[Instant, Instant]]] = {}

    def look(self) -> None:
        """Do what the broker and the threads of clients would have done by now."""
        holder = self.holder
        if holder is not None:
            is_drained = holder.is_drained is not None and holder.is_drained()
            if is_drained or (self.queue and self.hosts.now_s - self.contended_since_s > HOLD_LIMIT_S):
                self.end(holder)
        if self.holder is None and self.queue:
            self.holder = self.queue.pop(0)
            self.contended_since_s = self.hosts.now_s

    def end(self, holder: VirtualLease) -> None:
        assert self.holder is holder
        self.holder, holder.is_drained, holder.ended_s = None, None, self.hosts.now_s

    def intervals(self, job: str) -> list[Interval]:
        """When the device has computed for this job."""
        ended = self.hosts.now_s
        return [
            (begin.s, end.s)
            for begin, end in self.computed[job]
            if begin.s is not None and end.s is not None and end.s <= ended
        ]


class VirtualLease(GpuLease):
    """What training and fillers use of a lease."""

    def __init__(self, gpu: VirtualGpu, job: str, role: Literal["peer", "filler"] = "peer") -> None:
        self.gpu, self.job, self.role = gpu, job, role
        self.is_drained: Callable[[], bool] | None = None
        self.ended_s = -1.0
        gpu.computed[job] = []

    @property
    def holding(self) -> bool:
        self.gpu.look()
        return self.gpu.holder is self and self.is_drained is None

    @property
    def contended(self) -> bool:
        return any(lease is not self for lease in self.gpu.queue)

    @property
    def taken(self) -> bool:
        self.gpu.look()
        return self.gpu.holder not in (None, self)

    @property
    def released_s(self) -> float:
        return self.ended_s

    @property
    def draining(self) -> bool:
        return self.is_drained is not None

    def wait_until_connected(self, timeout_s: float) -> bool:
        return True

    def stats(self) -> LeaseStats:
        return LeaseStats(0, {}, 0, 0.0)

    def acquire(self, *, eager: bool = False) -> bool:
        gpu = self.gpu
        gpu.look()
        if not self.contended:
            self.is_drained = None
        while self.is_drained is not None:
            gpu.hosts.spend(POLL_S)
            gpu.look()
        if gpu.holder is self:
            return True
        if gpu.holder is not None and not gpu.queue:
            gpu.contended_since_s = gpu.hosts.now_s
        gpu.queue.append(self)
        gpu.look()
        while gpu.holder is not self:
            gpu.hosts.spend(POLL_S)
            gpu.look()
        return True

    def release_when(self, is_drained: Callable[[], bool] | None) -> None:
        if self.gpu.holder is self:
            self.is_drained = is_drained or (lambda: True)
            self.gpu.look()

    def release(self, stream: Any = None) -> None:
        last = FakeEvent(_current_stream())
        self.release_when(last.query)


def _current_stream() -> FakeStream:
    stream: Any = device.current_stream(torch.device("cpu"))
    assert isinstance(stream, FakeStream)
    return stream


@contextmanager
def virtual_hosts() -> Iterator[Hosts]:
    """Within it, threads that `Hosts.run` starts are hosts, each with a stream of its own."""
    hosts = Hosts()
    streams = threading.local()

    def current(device: Any = None) -> FakeStream:
        if not hasattr(streams, "current"):
            streams.current = FakeStream()
        return streams.current

    replacements = [
        (FakeStream, "hosts", hosts),
        (device, "current_stream", current),
        (device, "record", FakeEvent),
        (device, "seconds_between", seconds_between),
        *((module, "time", HostClock(hosts)) for module in (forward_times, gap, held_forward, lease_holder, turns)),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield hosts


class Alone(NoOtherJobs):
    """The turns of a job without a lease."""

    def want(self) -> None:
        pass

    def step_ended(self) -> None:
        pass


@dataclass
class Rank:
    """One rank of a job that trains with DeAR: gather legs end before the forwards that need them.

    Attributes:
        meetings: the legs of all ranks, by step and group; the first rank to come makes them.
        forward_s, backward_s: of one group.
        leg_s: of both legs of one group.
        launch_s: host time of each kernel.
        fast_from_step: from which step on the wire takes no time; never by default.
        reads_early: whether a script waits for all legs between turns, as one that reads gradients does, and then
            updates in a turn of its own.
        steps_s: when each step of the host ended.
    """

    gpu: VirtualGpu
    lease: VirtualLease | None
    job: str
    ranks: int
    meetings: dict[Any, Meeting]
    groups: int = 6
    forward_s: float = 1e-3
    backward_s: float = 2e-3
    leg_s: float = 6e-3
    launch_s: float = LAUNCH_S
    fast_from_step: int = 10**6
    reads_early: bool = False
    steps_s: list[float] = field(default_factory=list)
    turns: Any = None

    def train(self, steps: int, begin_s: float = 0.0) -> None:
        hosts = self.gpu.hosts
        hosts.spend(begin_s)
        cpu, clock = torch.device("cpu"), CommClock()
        comm: Any = FakeStream()
        streams = CudaStreams(cpu, (comm,))
        self.turns = Alone() if self.lease is None else Turns(self.lease, clock, lambda reason: None, streams)
        link: Any = SimpleNamespace(clock=clock, watch=SimpleNamespace(add=lambda *leg: None))
        self.gpu.computed.setdefault(self.job, [])
        legs: dict[int, _NcclLeg] = {}
        for step in range(steps):
            self.turns.want()
            for group in range(self.groups):
                if group in legs:
                    with self.turns.gap(group, lambda: all(leg.is_done() for leg in legs.values())) as host_wait:
                        legs[group].wait(host_wait)
                self.turns.resume()
                self._compute(self.forward_s)
            for group in reversed(range(self.groups)):
                self._compute(self.backward_s)
                comm.wait_stream(_current_stream())
                key = (self.job, step, group)
                meeting = self.meetings.setdefault(
                    key, Meeting(self.ranks, self.leg_s if step < self.fast_from_step else 1e-5)
                )
                meeting.join(Instant(comm.done, not_before_s=hosts.now_s))
                comm.done = meeting
                event: Any = FakeEvent(comm)
                legs[group] = _NcclLeg(link, f"leg {group}", group, comm, event)
            self.turns.release()
            self.turns.step_ended()
            if self.reads_early:
                for group, leg in legs.items():
                    with self.turns.gap(group) as host_wait:
                        leg.wait(host_wait)
                legs.clear()
                self.turns.want()
                self.turns.resume()
                self._compute(self.forward_s)
                self.turns.release()
            self.steps_s.append(hosts.now_s)
        hosts.sleep_until(_current_stream().done)

    def _compute(self, seconds: float) -> None:
        compute(self.gpu, self.job, seconds, self.launch_s)


def compute(gpu: VirtualGpu, job: str, seconds: float, launch_s: float = LAUNCH_S) -> None:
    """A kernel on the calling host's stream."""
    stream = _current_stream()
    computed = gpu.computed[job]
    if len(computed) >= MOST_QUEUED:
        gpu.hosts.sleep_until(computed[-MOST_QUEUED][1])
    begin = Instant(stream.done, not_before_s=gpu.hosts.now_s)
    stream.run(seconds)
    computed.append((begin, stream.done))
    gpu.hosts.spend(launch_s)


def fill(
    gpu: VirtualGpu, lease: VirtualLease, kernel_s: float, has_ended: Callable[[], bool], begin_s: float = 0.0
) -> None:
    """A job without gaps: one kernel a turn."""
    gpu.hosts.spend(begin_s)
    while not has_ended():
        lease.acquire()
        compute(gpu, lease.job, kernel_s)
        lease.release()
        gpu.hosts.spend(LAUNCH_S)
        # It does not run ahead: a turn is its kernel.
        gpu.hosts.sleep_until(_current_stream().done)


def both_s(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds in which both compute."""
    return sum(max(0.0, min(a_end, b_end) - max(a, b)) for a, a_end in one for b, b_end in other)


def idle(intervals: Sequence[Interval]) -> list[Interval]:
    """The times between intervals."""
    ordered = sorted(intervals)
    return [(end, begin) for (_, end), (begin, _) in pairwise(ordered) if begin > end]
