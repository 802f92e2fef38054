"""CUDA streams for a machine without CUDA: all work is done on the CPU at once, and who has waited for whom is kept.

Every stream has a vector clock. A `wait_stream` or `wait_event` merges the other's into it, as of the moment of the
wait or the record. Two accesses to the same bytes from two streams, one of them a write, are a race unless the later
stream's clock includes the earlier access: on a GPU nothing would keep their order then.

Only accesses to storages that are `watched` count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ddp_crossover import ddp_timer, dear
from ddp_crossover.collectives import make_link, nccl_link
from ddp_crossover.ddp import reducer
from ddp_crossover.parameters.pending_gradient import PendingGrad
from ddp_crossover.torch_internals.autograd import call_after_backward

_REAL_FUTURE = torch.futures.Future
# They make another tensor of the same memory, and neither read nor write it.
_ALIASING = ("aten::slice", "aten::detach", "aten::as_strided", "aten::narrow", "aten::alias", "aten::t")


class FakeStream:
    """A stream: the vector clock of what it is ordered behind."""

    device = torch.device("cpu")

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.clock: Counter[FakeStream] = Counter()

    def tick(self) -> int:
        self.clock[self] += 1
        return self.clock[self]

    def wait_stream(self, other: FakeStream) -> None:
        other.tick()
        self.clock |= other.clock

    def wait_event(self, event: FakeEvent) -> None:
        self.clock |= event.clock

    def synchronize(self) -> None:
        pass


class FakeEvent:
    """What a stream knew when it was recorded."""

    def __init__(self, **options: Any) -> None:
        self.clock: Counter[FakeStream] = Counter()

    def record(self, stream: FakeStream) -> None:
        stream.tick()
        self.clock = stream.clock.copy()

    def synchronize(self) -> None:
        pass


class FakeFuture(torch.futures.Future[Any]):
    """A future that knows the stream of its value, as one with devices does. It is complete before anybody waits."""

    gpu: Any = None

    def __class_getitem__(cls, item: Any) -> Any:
        return _REAL_FUTURE[item]  # DDP compares annotations with it

    def __init__(self, *, devices: Any = ()) -> None:
        super().__init__()
        self._written = FakeEvent() if devices else None

    def set_result(self, result: Any) -> None:
        if self._written is not None:
            self._written.record(self.gpu.current)
        super().set_result(result)

    def wait(self) -> Any:
        if self._written is not None:
            self.gpu.current.wait_event(self._written)
        return super().wait()

    def then(self, callback: Any) -> Any:
        if self._written is None:
            return super().then(callback)
        child = type(self)(devices=[FakeStream.device])
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
        future = FakeFuture(devices=[FakeStream.device])
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


class Gpu(TorchDispatchMode):
    """Sees every operation, and on which stream it would run."""

    def __init__(self) -> None:
        super().__init__()
        self.main = self.current = FakeStream()
        self.watched: set[int] = set()
        self.recorded: set[tuple[int, FakeStream]] = set()
        self.races: Counter[tuple[str, str]] = Counter()
        self.seen = 0
        self.all_reduces: list[AllReduce] = []
        self.kept: list[torch.Tensor] = []
        self._accesses: list[Access] = []

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """What `torch.cuda.stream` does."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

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
        if not (name.startswith("c10d") or "view" in name or name in _ALIASING):
            named = {argument.name: argument for argument in func._schema.arguments}
            given = [*zip(func._schema.arguments, args, strict=False), *((named[key], kwargs[key]) for key in kwargs)]
            for argument, value in given:
                writes = bool(argument.alias_info and argument.alias_info.is_write)
                for tensor in tree_iter(value):
                    if isinstance(tensor, torch.Tensor) and not isinstance(tensor, PendingGrad):
                        self.access(tensor, writes=writes, what=name)
        return func(*args, **kwargs)


@contextmanager
def fake_gpu(*, gather_writes: bool = True, ddp_waits: bool = True, keeps_reduced: bool = False) -> Iterator[Gpu]:
    """Within it a CPU model trains over `NcclLink` on fake streams. Call it on gloo groups.

    DDP waits for the futures of our hooks at the end of backward; `ddp_waits=False` takes these waits out.

    `gather_writes=False`: an all-gather leaves this rank's own shard alone, which at world size 1 is everything.
    Else it counts as writing all, as it does on other ranks, so that nobody may read early.

    `keeps_reduced`: the memory of all-reduces is kept, so that no address stands for two of them. Gradients that are
    views of it count as kept by the script.
    """
    gpu = Gpu()
    reduce_scatter, all_gather, all_reduce = nccl_link._reduce_scatter, nccl_link._all_gather, dist.all_reduce
    backend = FakeStream()
    make_pipeline = dear.Pipeline.__init__

    def scatter(shard: torch.Tensor, buffer: torch.Tensor, **options: Any) -> Any:
        gpu.access(buffer, writes=False, what="reduce_scatter")
        gpu.access(shard, writes=True, what="reduce_scatter")
        return reduce_scatter(shard, buffer, **options)

    def gather(buffer: torch.Tensor, shard: torch.Tensor, **options: Any) -> Any:
        gpu.access(shard, writes=False, what="all_gather")
        if gather_writes:
            gpu.access(buffer, writes=True, what="all_gather")
        return all_gather(buffer, shard, **options)

    def reduce(buffer: torch.Tensor, *, group: Any, async_op: bool = False) -> FakeWork | None:
        if async_op:
            backend.wait_stream(gpu.current)
        gpu.watch(buffer)
        with gpu.on(backend if async_op else gpu.current):
            gpu.access(buffer, writes=True, what="all_reduce")
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
        for arena in pipeline._arenas.values():
            gpu.watch(arena)

    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
        gpu.recorded.add((tensor.untyped_storage().data_ptr(), stream))

    replacements = [
        (torch.cuda, "Stream", FakeStream),
        (torch.cuda, "Event", FakeEvent),
        (torch.cuda, "stream", gpu.on),
        # Whoever leaves out the device gets the stream of another one, where the user has not called `set_device`.
        (torch.cuda, "current_stream", lambda device: gpu.current),
        (FakeFuture, "gpu", gpu),
        (torch.futures, "Future", FakeFuture),
        (torch.Tensor, "record_stream", record_stream),
        (make_link, "GlooLink", nccl_link.NcclLink),
        (nccl_link, "_reduce_scatter", scatter),
        (nccl_link, "_all_gather", gather),
        (dist, "all_reduce", reduce),
        (ddp_timer, "stream_for_all_reduces", lambda *of: FakeStream()),
        (ddp_timer.DdpTimer, "reduce", waited_for(ddp_timer.DdpTimer.reduce)),
        (reducer.Reducer, "reduce", waited_for(reducer.Reducer.reduce)),
        (dear.Pipeline, "__init__", watched_pipeline),
        (dear, "outside_of_modes", lambda job, stream: job()),  # this mode is to see updates
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        with gpu:
            yield gpu
