"""A wire between one GPU and others that do not exist: it takes as long as a ring of ranks would take to send.

The other ranks are twins of this one: they have the same gradients. So what would arrive from them is known, sums are
exact where their number is a power of two, and training ends with the weights of plain DDP.
"""

from typing import Any

import torch
from torch import Tensor

from bench_kit.device_time import Sleeper

GBIT = 1e9 / 8  # bytes per second


class Wire:
    """How long a message of a ring occupies the link of each of its ranks.

    Args:
        ranks: how many ranks the ring has, this one and its twins.

    Attributes:
        bytes_per_s: what each rank can send; infinite for no wire at all.
        latency_s: added for each reduce-scatter or all-gather, and twice for an all-reduce.
        twins_add: whether a sum includes the gradients of the twins. Where plain DDP runs on one rank, it divides by
            one, so nothing may be added.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.bytes_per_s = float("inf")
        self.latency_s = 0.0
        self.twins_add = True

    def leg_s(self, buffer_bytes: float) -> float:
        """Seconds for a reduce-scatter or an all-gather of a buffer."""
        return self.latency_s + buffer_bytes * (self.ranks - 1) / self.ranks / self.bytes_per_s

    def all_reduce_s(self, buffer_bytes: float) -> float:
        """Seconds for an all-reduce of a buffer."""
        return 2 * self.leg_s(buffer_bytes)

    def add_twins(self, part: Tensor) -> None:
        """Turn this rank's gradients into the sum over all ranks."""
        if self.twins_add:
            part.mul_(self.ranks)


class GpuWire(Wire):
    """Sleeps on the current stream, in the place of collectives.

    The collectives are called as well, with one rank, where they move nothing: so the host pays for its calls.

    Args:
        ranks: how many ranks the ring has.
        device: the GPU.
        reduce_scatter: torch's function.
        all_gather: torch's function.
        all_reduce: torch's function.
    """

    def __init__(
        self, ranks: int, device: torch.device, *, reduce_scatter: Any, all_gather: Any, all_reduce: Any
    ) -> None:
        super().__init__(ranks)
        self.sleeper = Sleeper(device)
        self._real_reduce_scatter, self._real_all_gather = reduce_scatter, all_gather
        self._real_all_reduce = all_reduce

    def reduce_scatter(self, shard: Tensor, buffer: Tensor, group: Any = None) -> None:
        """In the place of `dist.reduce_scatter_single`; `shard` is a part of `buffer`."""
        self._real_reduce_scatter(shard, shard, group=group)
        self.sleeper.sleep(self.leg_s(buffer.nbytes))
        self.add_twins(shard)

    def all_gather(self, buffer: Tensor, shard: Tensor, group: Any = None) -> None:
        """In the place of `dist.all_gather_single`."""
        self._real_all_gather(shard, shard, group=group)
        self.sleeper.sleep(self.leg_s(buffer.nbytes))
        if buffer.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr():
            self.add_twins(buffer[shard.numel() :])  # the first rank's shard comes first, and was added up before
        else:  # an exchange of norms, of which the twins have the same
            buffer.view(self.ranks, -1).copy_(shard.expand(self.ranks, -1))

    def all_reduce(self, buffer: Tensor, group: Any = None, async_op: bool = False) -> None:
        """In the place of `dist.all_reduce` on a stream of the link's own."""
        assert not async_op
        self._real_all_reduce(buffer, group=group)
        self.sleeper.sleep(self.all_reduce_s(buffer.nbytes))
        self.add_twins(buffer)
