"""Legs over NCCL, on a CUDA stream of their own. The host enqueues and does not wait.

Where slices do not travel as they are, a leg does the rounds of gloo, whose messages are one all-to-all, on the same
stream: what is computed from them stays on the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover import device as gpu
from ddp_crossover.comm.all_reduce import all_reduce_sum
from ddp_crossover.comm.fusion_buffer import FusionBuffer, Memory
from ddp_crossover.comm.leg import HostWait, Leg, ScatterLeg
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.nodes import Nodes
from ddp_crossover.comm.round import Round, Slice
from ddp_crossover.comm.rounds import rounds_of
from ddp_crossover.comm.stream_order import CudaStreams
from ddp_crossover.comm.sums import ScratchPool
from ddp_crossover.nccl.leg_watch import LegWatch
from ddp_crossover.torch_internals.groups import new_group
from ddp_crossover.torch_internals.profiling import named_range

_all_to_all = dist.all_to_all


class DeviceScratch(ScratchPool):
    """Memory for payloads, from the allocator of the device, which reuses it on the stream that it is used on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def free(self, tensors: list[Tensor]) -> None:
        pass  # the last reference frees it


class LegsInRounds:
    """Both legs of one fusion group whose slices do not travel as they are.

    Args:
        buffer: its fusion buffer, which says how they travel.
        process_group: the group of the legs.
        device: device of the buffer.
    """

    def __init__(self, buffer: FusionBuffer, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self._process_group = process_group
        self._world_size = dist.get_world_size(process_group)
        nodes = Nodes.flat(dist.get_rank(process_group), self._world_size)
        self._rounds = rounds_of(Memory(buffer), nodes, DeviceScratch(device), sums_in_fp32=False)

    def scatter(self) -> int:
        """Run the scatter leg on the current stream; returns the bytes that this rank has sent."""
        return self._run(self._rounds.scatter)

    def gather(self) -> int:
        """Run the gather leg on the current stream; returns the bytes that this rank has sent."""
        sent_bytes = self._run(self._rounds.gather)
        self._rounds.release()
        return sent_bytes

    def _run(self, rounds: Sequence[Round]) -> int:
        sent_bytes = 0
        for one in rounds:
            incoming, outgoing = one.receives(), one.sends()
            _all_to_all(self._by_rank(incoming), self._by_rank(outgoing), group=self._process_group)
            one.finish()
            sent_bytes += sum(memory.nbytes for _, memory in outgoing)
        return sent_bytes

    def _by_rank(self, slices: Sequence[Slice]) -> list[Tensor]:
        """One tensor for each rank, an empty one for this rank."""
        of_peers = dict(slices)
        [(_, like), *_] = slices
        return [of_peers.get(rank, like[:0]) for rank in range(self._world_size)]


# torch 2.13 renamed both functions; the old names warn from then on.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Above a few MiB NCCL's choice of an algorithm no longer changes.
_LARGE_NUMEL = 2**20


class _NcclLeg(Leg):
    """A leg between two CUDA events of the communication stream."""

    def __init__(self, link: NcclLink, label: str, group: int, stream: gpu.Stream, begun: gpu.Event) -> None:
        self.label = label
        self.group = group
        self._clock = link.clock
        self._done = gpu.record(stream, timed=True)
        self._device = stream.device
        link.watch.add(label, begun, self._done)

    def wait(self, host_wait: HostWait | None = None) -> None:
        stream = gpu.current_stream(self._device)
        if host_wait is not None:
            host_wait.before_stream_waits(self._done)
        begin = self._clock.mark(stream)
        stream.wait_event(self._done)
        self._clock.span("wait", begin, stream, group=self.group, what=self.label)

    def is_done(self) -> bool:
        return bool(self._done.query())


class _NcclScatterLeg(_NcclLeg, ScatterLeg):
    def __init__(
        self,
        link: NcclLink,
        group: int,
        buffer: FusionBuffer,
        stream: gpu.Stream,
        begun: gpu.Event,
        *,
        landing: FusionBuffer | None = None,
        in_rounds: LegsInRounds | None = None,
    ) -> None:
        super().__init__(link, f"scatter leg of fusion group {group}", group, stream, begun)
        self.buffer = buffer
        self.landing = landing
        self.in_rounds = in_rounds
        self._shards = buffer.slices(link.rank, link.world_size)

    def shards(self) -> list[Tensor]:
        return self._shards


class NcclLink(Link):
    """Reduce-scatter and all-gather in the order of the calls, which must be the same on all ranks.

    Small exchanges have their own process group and stream: on those of the legs, a norm would be known only after
    all gather legs that have been enqueued before it.

    It has no staging thread, announcements or pace: the streams keep the order, and NCCL matches operations by it.

    ``sent_bytes`` is an estimate, what a ring sends: ``(n - 1) / n`` of the buffer per leg. NCCL does not report it.

    Args:
        process_group: process group for the legs.
        device: device of the gradients.
        small_group: process group for small exchanges, over the same ranks. Ends with the link.
        timeout: time-out of both process groups.

    Attributes:
        watch: names a leg that does not end.
    """

    has_fused_all_reduce = True
    spins_on_device = True
    codes_on_host = False
    # NCCL copies in vectors of 16 bytes and in lines of 128, and falls back to slower ways for other addresses. A group
    # begins at a multiple of it, too, as torch's allocator aligns, which kernels on fusion buffers like.
    shard_align_bytes = 256

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        small_group: dist.ProcessGroup,
        timeout: timedelta,
    ) -> None:
        super().__init__(process_group)
        self.watch = LegWatch(self.rank, timeout.total_seconds())
        self._gather_group = process_group
        self._small_group = small_group
        self._host_group: dist.ProcessGroup | None = None
        self._timeout = timeout
        self._device = device
        # High priority: communication kernels are small, and would otherwise wait behind compute kernels.
        self._stream = gpu.new_stream(device, urgent=True)
        self._small_stream = gpu.new_stream(device, urgent=True)
        self.all_reduce_stream = self._stream
        self.streams = CudaStreams(device, (self._stream,))

    def reduce_scatter(self, group: int, buffer: FusionBuffer, landing: FusionBuffer | None = None) -> _NcclScatterLeg:
        memory, [shard] = buffer.whole(), buffer.slices(self.rank, self.world_size)
        in_rounds = None if buffer.travel is None else LegsInRounds(buffer, self.process_group, self._device)
        with self.meter.host.of("leg"), named_range(f"ddp_crossover::reduce_scatter[{group}]"):
            # Wait for the staging copies, which run on the caller's stream.
            self._stream.wait_stream(gpu.current_stream(self._device))
            begin, begun = self.clock.mark(self._stream), gpu.record(self._stream)
            with gpu.on_stream(self._stream):
                if in_rounds is not None:
                    self.meter.sent(in_rounds.scatter())
                else:
                    _reduce_scatter(shard, memory, group=self.process_group)
                    self._count(memory)
            self.clock.span("scatter", begin, self._stream, group=group)
        return _NcclScatterLeg(self, group, buffer, self._stream, begun, landing=landing, in_rounds=in_rounds)

    def all_gather(self, scatter: ScatterLeg, urgency: int | None = None) -> Leg:
        leg = cast(_NcclScatterLeg, scatter)
        buffer = leg.buffer
        if leg.landing is not None:
            buffer = leg.landing
            # Wait for the current stream, which fills the landing.
            self._stream.wait_stream(gpu.current_stream(self._device))
        whole, [own] = buffer.whole(), buffer.slices(self.rank, self.world_size)
        with (
            self.meter.host.of("leg"),
            named_range(f"ddp_crossover::all_gather[{leg.group}]"),
            gpu.on_stream(self._stream),
        ):
            begin, begun = self.clock.mark(self._stream), gpu.record(self._stream)
            if leg.in_rounds is not None:
                self.meter.sent(leg.in_rounds.gather())
            else:
                self._gather(whole, own)
                self._count(whole)
            self.clock.span("gather", begin, self._stream, group=leg.group)
        return _NcclLeg(self, f"gather leg of fusion group {leg.group}", leg.group, self._stream, begun)

    def all_reduce_leg(self, group: int, buffer: FusionBuffer) -> ScatterLeg:
        memory = buffer.whole()
        with named_range(f"ddp_crossover::all_reduce[{group}]"):
            # Wait for the staging copies, which run on the caller's stream.
            self._stream.wait_stream(gpu.current_stream(self._device))
            begin, begun = self.clock.mark(self._stream), gpu.record(self._stream)
            with gpu.on_stream(self._stream):
                dist.all_reduce(memory, group=self.process_group)
            self.clock.span("all_reduce", begin, self._stream, group=group)
        self._count(memory)
        self._count(memory)
        return _NcclScatterLeg(self, group, buffer, self._stream, begun)

    def all_reduce(self, group: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        self._count(buffer)
        self._count(buffer)
        with named_range(f"ddp_crossover::all_reduce[{group}]"):
            return all_reduce_sum(buffer, self.process_group, self.clock, group, self._stream)

    def all_gather_small(self, value: Tensor) -> Tensor:
        rows = value.new_empty((self.world_size, *value.shape))
        # Wait for `value`, which is written on the caller's stream.
        self._small_stream.wait_stream(gpu.current_stream(self._device))
        with gpu.on_stream(self._small_stream):
            _all_gather(rows.view(-1), value.reshape(-1), group=self._small_group)
        # Make the caller's stream wait for the rows before it reads them.
        gpu.current_stream(self._device).wait_stream(self._small_stream)
        return rows

    def exchange_numbers(self, value: int) -> Callable[[], list[int]]:
        # Over gloo, between the hosts: the device may be steps behind, and the answer decides what it gets next.
        if self._host_group is None:
            ranks = dist.get_process_group_ranks(self.process_group)
            self._host_group = new_group(ranks, backend="gloo", timeout=self._timeout, purpose="decisions")
            self.owned_groups.add(self._host_group)
        rows = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world_size)]
        exchange = dist.all_gather(rows, torch.tensor([value], device="cpu"), group=self._host_group, async_op=True)

        def wait() -> list[int]:
            exchange.wait()
            return [int(row) for row in rows]

        return wait

    @contextlib.contextmanager
    def beside_legs(self) -> Iterator[None]:
        # Wait for memory that the caller's stream has made.
        self._stream.wait_stream(gpu.current_stream(self._device))
        with gpu.on_stream(self._stream):
            yield

    def connect(
        self, arenas: Collection[Tensor], coded: Sequence[FusionBuffer] = (), *, exchanges_numbers: bool = False
    ) -> None:
        """Make NCCL create its communicators and connections now, with legs that overwrite the largest arena.

        NCCL chooses its algorithm by size and connects for each algorithm on first use, so small and large legs run.
        What codes need beside the arenas comes from the allocator, which keeps it for the stream of the legs.
        """
        super().connect(arenas)
        memory = max(arenas, key=lambda arena: arena.nbytes)
        with self.meter.unrecorded():
            for numel in (self.world_size, min(memory.numel(), _LARGE_NUMEL)):
                buffer = FusionBuffer((memory[: numel // self.world_size * self.world_size].zero_(),))
                self.all_gather(self.reduce_scatter(0, buffer)).wait()
                self.all_reduce_leg(0, buffer).wait()
            for buffer in coded:
                self.all_gather(self.reduce_scatter(0, buffer)).wait()
            self.all_gather_small(torch.zeros(1, device=self._device))
        if exchanges_numbers:
            self.exchange_numbers(0)()

    def shut_down(self) -> None:
        self.watch.close()
        super().shut_down()
        for name in ("_gather_group", "_small_group"):
            vars(self).pop(name, None)
        self._host_group = None

    def _waits_for_use(self) -> Callable[[], None]:
        # Let legs under way finish: destroying their process group would abort them.
        return functools.partial(_wait_for, (self._stream, self._small_stream))

    def _gather(self, whole: Tensor, own: Tensor) -> None:
        _all_gather(whole, own, group=self._gather_group)

    def _count(self, buffer: Tensor) -> None:
        self.meter.sent(buffer.nbytes * (self.world_size - 1) // self.world_size)


def _wait_for(streams: Iterable[gpu.Stream]) -> None:
    for stream in streams:
        stream.synchronize()
