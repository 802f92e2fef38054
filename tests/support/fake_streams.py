"""A GPU for a machine without one, in place of `ddp_crossover.device`: all work is done on the CPU at once, and it is
kept who has waited for whom, and when a GPU would have done it.

Order: every stream has a vector clock. A `wait_stream` or `wait_event` merges the other's into it, as of the moment of
the wait or the record. Two accesses to the same bytes from two streams, one of them a write, are a race unless the
later stream's clock includes the earlier access: on a GPU nothing would keep their order then. Only accesses to
storages that are `watched` count.

Time is virtual, see `virtual_time`. `Gpu.compute` and legs on a `Wire` take time on their stream, every operation takes
the host `launch_s`, and nothing else takes any.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from bench_kit.virtual_clock import HostClock
from ddp_crossover import dear, device
from ddp_crossover.addons import ddp_timer
from ddp_crossover.comm import meter
from ddp_crossover.hook import reducer
from ddp_crossover.nccl import make_link, nccl_link
from ddp_crossover.pending.pending_gradient import PendingGrad
from ddp_crossover.pipeline import pending_updates
from ddp_crossover.step import step_call
from ddp_crossover.torch_internals.autograd import call_after_backward
from ddp_crossover.torch_internals.current_streams import CurrentStreams
from virtual_time import Hosts, Instant

# They make another tensor of the same memory, and neither read nor write it.
_ALIASING = ("aten::slice", "aten::detach", "aten::as_strided", "aten::narrow", "aten::alias", "aten::t")

# What blocks the host on a GPU. Numbers of Python that become a tensor of any kind, as indices in a list do, are copied
# to the device from memory that is not pinned. Where Python writes one number, a kernel gets it as an argument.
_BLOCKING = {
    "aten::_local_scalar_dense": "item",
    "aten::lift_fresh": "numbers of Python",
    "aten::nonzero": "nonzero",
}


class FakeStream:
    """A stream: the vector clock of what it is ordered behind, and when it has done all that is queued."""

    device = torch.device("cpu")
    hosts = Hosts()

    def __init__(self, device: Any = None, *, urgent: bool = False) -> None:
        self.clock: Counter[FakeStream] = Counter()
        self.done = Instant()

    def tick(self) -> int:
        self.clock[self] += 1
        return self.clock[self]

    def run(self, seconds: float) -> None:
        """Queue work that takes so long."""
        self.done = Instant(self.done, not_before_s=self.hosts.now_s, lasts_s=seconds)

    def wait_stream(self, other: FakeStream) -> None:
        other.tick()
        self.clock |= other.clock
        self.done = Instant(self.done, other.done)

    def synchronize(self) -> None:
        self.hosts.sleep_until(self.done)

    def query(self) -> bool:
        return self.done.s is not None and self.done.s <= self.hosts.now_s

    def wait_event(self, event: FakeEvent) -> None:
        self.clock |= event.clock
        self.done = Instant(self.done, event.at)


class FakeEvent:
    """What a stream knew when it was recorded, and when it gets there."""

    def __init__(self, stream: FakeStream, *, timed: bool = False, awaited: bool = False) -> None:
        stream.tick()
        self.clock = stream.clock.copy()
        self.at = Instant(stream.done, not_before_s=stream.hosts.now_s)
        self.is_timed = timed

    def query(self) -> bool:
        return self.at.s is not None and self.at.s <= FakeStream.hosts.now_s


def seconds_between(begin: FakeEvent, end: FakeEvent) -> float:
    """As CUDA demands, both must have happened, and been made for it."""
    assert begin.is_timed and end.is_timed
    assert begin.query() and end.query()
    assert begin.at.s is not None and end.at.s is not None
    return end.at.s - begin.at.s


class FakeFuture(torch.futures.Future[Any]):
    """A future that knows the stream of its value, as one with devices does. It is complete before anybody waits."""

    gpu: Any = None

    def set_result(self, result: Any) -> None:
        self._written = FakeEvent(self.gpu.current)
        super().set_result(result)

    def wait(self) -> Any:
        self.gpu.current.wait_event(self._written)
        return super().wait()

    def then(self, callback: Any) -> Any:
        child = type(self)()
        with self.gpu.on(FakeStream()):  # one of torch's pool
            self.wait()
            child.set_result(callback(self))
        return child


class FakeWork:
    """Of a collective that runs on a stream of the backend; asked for its future, it behaves as torch 2.15's NCCL."""

    def __init__(self, gpu: Gpu, stream: FakeStream, result: list[torch.Tensor]) -> None:
        self._gpu, self._stream, self._result = gpu, stream, result

    def get_future(self) -> FakeFuture:
        self._gpu.current.wait_stream(self._stream)
        future = FakeFuture()
        future.set_result(self._result)
        return future


class Access(NamedTuple):
    low: int
    high: int
    writes: bool
    stream: FakeStream
    time: int
    what: str


class AllReduce(NamedTuple):
    """One all-reduce: the address of its memory, when and where it ran."""

    address: int
    stream: FakeStream
    time: int


class Wire(NamedTuple):
    """How long legs take: as in a ring, `(n - 1) / n` of their bytes are sent."""

    per_leg_s: float
    s_per_byte: float


FAST = Wire(per_leg_s=1e-5, s_per_byte=1e-10)


class Gpu(TorchDispatchMode):
    """Sees every operation, and on which stream it would run.

    Attributes:
        host_waits: how often the host has waited for the device, by way.
    """

    def __init__(self, wire: Wire, launch_s: float) -> None:
        super().__init__()
        self.hosts = Hosts()
        self.host_waits: Counter[str] = Counter()
        self._wire = wire
        self._launch_s = launch_s
        self.main = FakeStream()
        self._thread = threading.local()
        self.streams = CurrentStreams(self._set_current)
        self.watched: set[int] = set()
        self.recorded: set[tuple[int, FakeStream]] = set()
        self.races: Counter[tuple[str, str]] = Counter()
        self.seen = 0
        self.all_reduces: list[AllReduce] = []
        self.kept: list[torch.Tensor] = []
        self._accesses: list[Access] = []

    @property
    def current(self) -> FakeStream:
        """The calling thread's current stream."""
        return getattr(self._thread, "current", self.main)

    def _set_current(self, stream: FakeStream) -> None:
        self._thread.current = stream

    @contextmanager
    def on(self, stream: FakeStream, switch: Any = None) -> Iterator[None]:
        """Switch to a stream as the package does, unnoticed."""
        before, switch = self.current, switch or self._set_current
        switch(stream)
        try:
            yield
        finally:
            switch(before)

    def stream(self, stream: FakeStream) -> Any:
        """What `torch.cuda.stream` does, for scripts."""
        return self.on(stream, self.streams.switch)

    def compute(self, seconds: float) -> None:
        """Queue a kernel on the current stream that takes so long."""
        self.current.run(seconds)

    def leg(self, buffer: torch.Tensor, group: Any) -> None:
        """A collective on the current stream: it begins when all ranks have got to it."""
        ready = Instant(self.current.done, not_before_s=self.hosts.now_s)
        assert ready.s is not None
        ranks = dist.get_world_size(group)
        with _not_seen():
            latest_s = torch.tensor([ready.s], dtype=torch.float64)
            _all_reduce(latest_s, dist.ReduceOp.MAX, group)
            begin_s = latest_s.item()
        takes_s = self._wire.per_leg_s + buffer.nbytes * (ranks - 1) / ranks * self._wire.s_per_byte
        self.current.done = Instant(not_before_s=begin_s, lasts_s=takes_s)

    def sleep_until(self, event: FakeEvent) -> None:
        """Of the host."""
        self.host_waits["event"] += 1
        self.hosts.sleep_until(event.at)

    def synchronize(self, device: Any = None) -> None:
        """The host waits for the current stream."""
        self.host_waits["synchronize"] += 1
        self.hosts.sleep_until(self.current.done)

    def watch(self, tensor: torch.Tensor) -> None:
        self.watched.add(tensor.untyped_storage().data_ptr())

    def access(self, tensor: torch.Tensor, *, writes: bool, what: str) -> None:
        if not tensor.numel() or tensor.untyped_storage().data_ptr() not in self.watched:
            return
        low, high = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        now = Access(low, high, writes, self.current, self.current.tick(), what)
        self.seen += 1
        kept = []
        for then in self._accesses:
            if then.low < high and low < then.high and (writes or then.writes):
                if self.current.clock[then.stream] < then.time:
                    self.races[then.what, what] += 1
                elif writes and low <= then.low and then.high <= high:
                    continue  # whoever is ordered behind this access is behind that one too
            kept.append(then)
        self._accesses = [*kept, now]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if self._launch_s:
            self.hosts.spend(self._launch_s)
        way = _BLOCKING.get(name)
        if name == "aten::index" and any(each is not None and each.dtype is torch.bool for each in args[1]):
            way = "nonzero"
        if way is not None:
            self.host_waits[way] += 1
            self.hosts.sleep_until(self.current.done)
        if not (name.startswith("c10d") or "view" in name or name in _ALIASING):
            named = {argument.name: argument for argument in func._schema.arguments}
            given = [*zip(func._schema.arguments, args, strict=False), *((named[key], kwargs[key]) for key in kwargs)]
            for argument, value in given:
                writes = bool(argument.alias_info and argument.alias_info.is_write)
                for tensor in tree_iter(value):
                    if isinstance(tensor, torch.Tensor) and not isinstance(tensor, PendingGrad):
                        self.access(tensor, writes=writes, what=name)
        return func(*args, **kwargs)


_all_reduce = dist.all_reduce
_not_seen = _disable_current_modes


@contextmanager
def fake_gpu(
    *,
    gather_writes: bool = True,
    ddp_waits: bool = True,
    keeps_reduced: bool = False,
    wire: Wire = FAST,
    launch_s: float = 0.0,
) -> Iterator[Gpu]:
    """Within it a CPU model trains over `NcclLink` on fake streams. Call it on gloo groups.

    DDP waits for the futures of our hooks at the end of backward; `ddp_waits=False` takes these waits out.

    `gather_writes=False`: an all-gather leaves this rank's own shard alone, which at world size 1 is everything.
    Else it counts as writing all, as it does on other ranks, so that nobody may read early.

    `keeps_reduced`: the memory of all-reduces is kept, so that no address stands for two of them. Gradients that are
    views of it count as kept by the script.
    """
    gpu = Gpu(wire, launch_s)
    reduce_scatter, all_gather, all_reduce = nccl_link._reduce_scatter, nccl_link._all_gather, dist.all_reduce
    backend = FakeStream()
    make_pipeline, of_hosts = dear.Pipeline.__init__, nccl_link.NcclLink.exchange_numbers

    def scatter(shard: torch.Tensor, buffer: torch.Tensor, **options: Any) -> Any:
        gpu.access(buffer, writes=False, what="reduce_scatter")
        gpu.access(shard, writes=True, what="reduce_scatter")
        gpu.leg(buffer, options["group"])
        return reduce_scatter(shard, buffer, **options)

    def gather(buffer: torch.Tensor, shard: torch.Tensor, **options: Any) -> Any:
        gpu.access(shard, writes=False, what="all_gather")
        if gather_writes:
            gpu.access(buffer, writes=True, what="all_gather")
        gpu.leg(buffer, options["group"])
        return all_gather(buffer, shard, **options)

    def to_all(incoming: list[torch.Tensor], outgoing: list[torch.Tensor], *, group: Any) -> None:
        """An all-to-all, which gloo has not got in this form."""
        for tensors, writes in ((outgoing, False), (incoming, True)):
            for tensor in tensors:
                gpu.access(tensor, writes=writes, what="all_to_all")
        gpu.leg(torch.cat([tensor.view(torch.uint8) for tensor in outgoing]), group)
        with _not_seen():
            messages = [dist.irecv(t, group=group, group_src=rank) for rank, t in enumerate(incoming) if t.numel()]
            messages += [dist.isend(t, group=group, group_dst=rank) for rank, t in enumerate(outgoing) if t.numel()]
            for message in messages:
                assert message is not None
                message.wait()

    def reduce(buffer: torch.Tensor, *, group: Any, async_op: bool = False) -> FakeWork | None:
        if async_op:
            backend.wait_stream(gpu.current)
        gpu.watch(buffer)
        with gpu.on(backend if async_op else gpu.current):
            gpu.access(buffer, writes=True, what="all_reduce")
            gpu.leg(buffer, group)
            gpu.leg(buffer, group)
            gpu.all_reduces.append(AllReduce(buffer.untyped_storage().data_ptr(), gpu.current, gpu.current.tick()))
        if keeps_reduced:
            gpu.kept.append(buffer)
        all_reduce(buffer, group=group)
        return FakeWork(gpu, backend, [buffer]) if async_op else None

    def waited_for(hook: Any) -> Any:
        """What DDP does with a hook's future, by the same callbacks."""

        def call(state: Any, bucket: Any) -> Any:
            future = hook(state, bucket)
            if ddp_waits:
                call_after_backward(future.wait)
            return future

        return call

    def watched_pipeline(pipeline: dear.Pipeline, *args: Any, **options: Any) -> None:
        make_pipeline(pipeline, *args, **options)
        for arena in pipeline.layout.arenas.values():
            gpu.watch(arena)

    def exchange_numbers(link: nccl_link.NcclLink, value: int) -> Any:
        """Hosts talk to each other, and no device takes part."""
        with _not_seen():
            wait = of_hosts(link, value)

        def unseen() -> Any:
            with _not_seen():
                return wait()

        return unseen

    def keep(tensor: torch.Tensor, stream: FakeStream) -> None:
        gpu.recorded.add((tensor.untyped_storage().data_ptr(), stream))

    replacements = [
        (FakeStream, "hosts", gpu.hosts),
        (FakeFuture, "gpu", gpu),
        (meter, "time", HostClock(gpu.hosts)),
        (device, "has_streams", lambda device: True),
        (device, "new_stream", FakeStream),
        # Code that leaves out the device gets the stream of another one, where the user has not called `set_device`.
        (device, "current_stream", lambda device: gpu.current),
        (device, "on_stream", gpu.on),
        (device, "watch_switches", gpu.streams.watch),
        (device, "streams_of_threads", lambda device: gpu.streams.of_threads(FakeStream.device) | {gpu.main}),
        (device, "record", FakeEvent),
        (device, "sleep_until", gpu.sleep_until),
        (device, "seconds_between", seconds_between),
        (device, "synchronize", gpu.synchronize),
        (device, "keep", keep),
        (device, "future_on", lambda device: FakeFuture()),
        (device, "is_capturing", lambda device: False),
        (device, "is_recorded", lambda stream: False),
        (make_link, "GlooLink", nccl_link.NcclLink),
        (nccl_link, "_reduce_scatter", scatter),
        (nccl_link, "_all_gather", gather),
        (nccl_link.NcclLink, "exchange_numbers", exchange_numbers),
        (nccl_link, "_all_to_all", to_all),
        (dist, "all_reduce", reduce),
        (ddp_timer, "stream_for_all_reduces", lambda *of: FakeStream()),
        (ddp_timer.DdpTimer, "reduce", waited_for(ddp_timer.DdpTimer.reduce)),
        (reducer.Reducer, "reduce", waited_for(reducer.Reducer.reduce)),
        (dear.Pipeline, "__init__", watched_pipeline),
        (pending_updates, "outside_of_modes", lambda job: job()),  # this mode is to see updates
        (step_call, "is_inside_of_modes", lambda: False),  # which are deferred beside it
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        with gpu:
            yield gpu
