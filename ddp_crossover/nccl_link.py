"""Legs over NCCL, on a CUDA stream of their own. The host enqueues and never waits."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ddp_crossover.collectives import CommClock, Leg, Link, ScatterLeg, slice_bounds

# torch 2.13 renamed both; the old names warn there.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _NcclLeg(Leg):
    """A leg whose end is a CUDA event on the communication stream."""

    def __init__(self, label: str, stream: torch.cuda.Stream) -> None:
        self.label = label
        self._done = torch.cuda.Event()
        self._done.record(stream)
        self._device = stream.device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def drain(self) -> None:
        self.wait()


class _NcclScatterLeg(_NcclLeg, ScatterLeg):
    def __init__(self, group: int, buffer: Tensor, shard: Tensor, stream: torch.cuda.Stream) -> None:
        super().__init__(f"scatter leg of fusion group {group}", stream)
        self.group = group
        self.buffer = buffer
        self._shard = shard

    def shard(self) -> Tensor:
        return self._shard


class NcclLink(Link):
    """Reduce-scatter and all-gather in the order in which they are asked for, the same on all ranks.

    ``sent_bytes`` is what a ring sends, ``(n - 1) / n`` of the buffer per leg: NCCL does not tell.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.sent_bytes = 0
        self.clock = CommClock()
        self.process_group = process_group
        self._device = device
        # High priority: a small kernel that compute kernels would otherwise keep waiting.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def next_iteration(self) -> None:
        """Nothing to tell apart: NCCL matches by order."""

    def reduce_scatter(self, group: int, buffer: Tensor) -> _NcclScatterLeg:
        low, high = slice_bounds(buffer.numel(), self.world_size, self.rank)
        shard = buffer[low:high]
        with record_function(f"ddp_crossover::reduce_scatter[{group}]"):
            # Protects the staging copies, which are on the caller's stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                _reduce_scatter(shard, buffer, group=self.process_group)
        self._count(buffer)
        return _NcclScatterLeg(group, buffer, shard, self._stream)

    def all_gather(self, scatter: ScatterLeg) -> Leg:
        leg = cast(_NcclScatterLeg, scatter)
        with (
            record_function(f"ddp_crossover::all_gather[{leg.group}]"),
            torch.cuda.stream(self._stream),
        ):
            _all_gather(leg.buffer, leg.shard(), group=self.process_group)
        self._count(leg.buffer)
        return _NcclLeg(f"gather leg of fusion group {leg.group}", self._stream)

    def all_reduce(self, group: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(buffer, group=self.process_group, async_op=True)
        assert work is not None
        self._count(buffer)
        self._count(buffer)
        return work.get_future().then(lambda future: future.value()[0])

    def all_gather_small(self, value: Tensor) -> Tensor:
        rows = value.new_empty((self.world_size, *value.shape))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _all_gather(rows.view(-1), value.reshape(-1), group=self.process_group)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return rows

    def _count(self, buffer: Tensor) -> None:
        self.sent_bytes += buffer.nbytes * (self.world_size - 1) // self.world_size
