"""A GPU that several processes share, as an H200 was seen to share it. Pure: time passes when it is told.

Each process has streams, on which kernels run in order; the host only queues them. A kernel *computes*, or it *spins*,
as a collective does that waits for its peers: it ends at a time of its own, and occupies the GPU until then.

Without MPS one process has the GPU at a time. While several have kernels to run, each gets a slice in turn, and a
change takes some time. A process that only spins gets slices, too. What ends in somebody else's slice is seen in the
next own one. With MPS all run at once, and slow each other down.
"""

import dataclasses
import math
from collections import deque

_NOW_S = 1e-12


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How processes share the GPU. The defaults are an H200's; docs/lease-bench.md says how they were found.

    Attributes:
        mps: whether all processes run at once.
        legs_on_host: whether legs are no kernels, as those of gloo.
        slice_s: how long a process keeps the GPU while another one has kernels to run.
        spin_slice_s: the same for a process whose kernels only spin.
        switch_s: what a change of process takes.
        beside_compute: how much slower a kernel is beside one of another process that fills the GPU, with MPS.
        beside_spin: the same beside a spinning one.
    """

    mps: bool = False
    legs_on_host: bool = False
    slice_s: float = 2e-3
    spin_slice_s: float = 1.7e-3
    switch_s: float = 1e-4
    beside_compute: float = 2.8
    beside_spin: float = 1.14


class Event:
    """A point of a stream.

    Attributes:
        at_s: when the GPU came to it; None before.
    """

    def __init__(self) -> None:
        self.at_s: float | None = None

    def happen(self, now_s: float) -> None:
        self.at_s = now_s


@dataclasses.dataclass
class _Operation:
    compute_s: float = 0.0  # left to compute
    spin_s: float = 0.0
    ends_s: float | None = None  # of a spinning kernel that has begun
    waits_for: Event | None = None
    happens: Event | None = None

    @property
    def spins(self) -> bool:
        return self.spin_s > 0


class Stream:
    """Operations in order. Made by `Process.stream`."""

    def __init__(self, gpu: "Gpu") -> None:
        self._gpu = gpu
        self.queue: deque[_Operation] = deque()

    def compute(self, seconds: float) -> None:
        """Queue a kernel that takes so long alone."""
        self._put(_Operation(compute_s=seconds))

    def spin(self, seconds: float) -> None:
        """Queue a kernel that ends so long after it has begun, whoever has the GPU."""
        self._put(_Operation(spin_s=seconds))

    def record(self) -> Event:
        event = Event()
        self._put(_Operation(happens=event))
        return event

    def wait(self, event: Event) -> None:
        """What is queued from here on waits for the event."""
        self._put(_Operation(waits_for=event))

    def _put(self, operation: _Operation) -> None:
        self.queue.append(operation)
        self._gpu.settle()

    def head(self) -> _Operation | None:
        """What it does next; None if it is empty or waits."""
        if not self.queue or (self.queue[0].waits_for is not None and self.queue[0].waits_for.at_s is None):
            return None
        return self.queue[0]


class Process:
    """A process with kernels on the GPU.

    Args:
        gpu: the GPU.
        width: the part of the GPU that its computing kernels fill, which matters with MPS.

    Attributes:
        computed_s: for how long the GPU has computed for it.
    """

    def __init__(self, gpu: "Gpu", width: float) -> None:
        self._gpu = gpu
        self.width = width
        self.streams: list[Stream] = []
        self.computed_s = 0.0

    def stream(self) -> Stream:
        self.streams.append(Stream(self._gpu))
        return self.streams[-1]

    def heads(self) -> list[_Operation]:
        return [head for stream in self.streams if (head := stream.head()) is not None]

    def computes(self) -> bool:
        return any(head.compute_s > 0 for head in self.heads())

    def has_computed(self, seconds: float) -> None:
        self.computed_s += seconds

    def settle(self, now_s: float) -> bool:
        """Do all that takes no time; returns whether there was anything."""
        was_changed = False
        for stream in self.streams:
            while (head := stream.head()) is not None:
                if head.compute_s > _NOW_S:
                    break
                if head.spins:
                    if head.ends_s is None:
                        head.ends_s = now_s + head.spin_s
                    if head.ends_s > now_s + _NOW_S:
                        break
                if head.happens is not None:
                    head.happens.happen(now_s)
                stream.queue.popleft()
                was_changed = True
        return was_changed


class Gpu:
    """See the top of this file.

    Attributes:
        now_s: until when time has passed.
    """

    def __init__(self, sharing: Sharing) -> None:
        self.now_s = 0.0
        self._sharing = sharing
        self._processes: list[Process] = []
        self._wires = Process(self, 0.0)  # on no GPU
        self._active: Process | None = None
        self._slice_ends_s = math.inf
        self._switched_s = 0.0  # until when a change of process lasts

    def process(self, width: float = 1.0) -> Process:
        self._processes.append(Process(self, width))
        return self._processes[-1]

    def wire(self, process: Process) -> Stream:
        """A stream for the legs of a process."""
        return (self._wires if self._sharing.legs_on_host else process).stream()

    def advance(self, until_s: float, awaited: tuple[Event, ...] = ()) -> None:
        """Let time pass until `until_s`, or until one of these events has happened."""
        self.settle()
        while self.now_s < until_s and all(event.at_s is None for event in awaited):
            rates = self._rates()
            next_s = min(until_s, self._next_s(rates))
            passed_s = next_s - self.now_s
            self.now_s = next_s
            for process, rate in rates.items():
                for head in process.heads():
                    if head.compute_s > 0:
                        head.compute_s = max(0.0, head.compute_s - passed_s * rate)
                        process.has_computed(passed_s * rate)
            self.settle()

    def settle(self) -> None:
        """Do all that takes no time now."""
        while any(process.settle(self.now_s) for process in self._running()):
            pass
        if not self._sharing.mps:
            self._schedule()

    def _running(self) -> list[Process]:
        if self._sharing.mps:
            return [*self._processes, self._wires]
        if self._active is None:
            self._schedule()
        active = [self._active] if self._active is not None and self.now_s >= self._switched_s else []
        return [*active, self._wires]

    def _schedule(self) -> None:
        """Pass the GPU on where its process has nothing to run, or has had its slice."""
        active = self._active
        others = self._others_with_work()
        if active is not None and active.heads():
            if not others:
                self._slice_ends_s = math.inf
                return
            if self._slice_ends_s == math.inf:  # the other one has just come
                self._slice_ends_s = self.now_s + self._slice_s(active)
            if self.now_s < self._slice_ends_s - _NOW_S:
                return
        if not others:
            return
        self._active = others[0]
        if active is not None:
            self._switched_s = self.now_s + self._sharing.switch_s
        begin_s = max(self.now_s, self._switched_s)
        is_shared = active is not None and bool(active.heads())
        self._slice_ends_s = begin_s + self._slice_s(others[0]) if is_shared or len(others) > 1 else math.inf
        if self._active is not None and self.now_s >= self._switched_s:
            self.settle()

    def _slice_s(self, process: Process) -> float:
        return self._sharing.slice_s if process.computes() else self._sharing.spin_slice_s

    def _others_with_work(self) -> list[Process]:
        """Those that have something to run, the one that comes next first."""
        processes = self._processes
        first = processes.index(self._active) + 1 if self._active is not None else 0
        ordered = processes[first:] + processes[:first]
        return [process for process in ordered if process is not self._active and process.heads()]

    def _rates(self) -> dict[Process, float]:
        """How fast each process computes now, as a part of its speed alone."""
        running = self._running()
        rates = {}
        for process in running:
            others = [other for other in running if other not in (process, self._wires)]
            width = sum(other.width for other in others if other.computes())
            slower = 1 + width * (self._sharing.beside_compute - 1)
            if not width and any(other.heads() for other in others):
                slower = self._sharing.beside_spin
            rates[process] = 1 / slower
        return rates

    def _next_s(self, rates: dict[Process, float]) -> float:
        """When something changes next."""
        times_s = [self._slice_ends_s]
        if not self._sharing.mps and self.now_s < self._switched_s:
            times_s.append(self._switched_s)
        for process, rate in rates.items():
            for head in process.heads():
                if head.compute_s > 0:
                    times_s.append(self.now_s + head.compute_s / rate)
                elif head.ends_s is not None:
                    times_s.append(head.ends_s)
        return min(time_s for time_s in times_s if time_s > self.now_s)
