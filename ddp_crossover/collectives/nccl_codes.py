"""What legs over NCCL do where slices travel as codes: the rounds of gloo, whose messages are one all-to-all.

Everything runs on the communication stream, and the host does not wait: whether sums are finite stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.gloo_messages import Slice
from ddp_crossover.collectives.nodes import Nodes
from ddp_crossover.collectives.rank_order_sum import ScratchPool
from ddp_crossover.collectives.rounds import Round
from ddp_crossover.collectives.route import Route

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


class CodedLegs:
    """Both legs of one fusion group with codes.

    Args:
        buffer: its fusion buffer, with a coding.
        process_group: the group of the legs.
        device: device of the buffer.
    """

    def __init__(self, buffer: FusionBuffer, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self._process_group = process_group
        self._rank = dist.get_rank(process_group)
        self._world_size = dist.get_world_size(process_group)
        nodes = Nodes.flat(self._rank, self._world_size)
        self._route = Route(buffer, nodes, DeviceScratch(device), sums_in_fp32=False)

    def scatter(self) -> int:
        """Run the scatter leg on the current stream; returns the bytes that this rank has sent."""
        return self._run(self._route.scatter)

    def gather(self) -> int:
        """Run the gather leg on the current stream; returns the bytes that this rank has sent."""
        sent_bytes = self._run(self._route.gather)
        self._route.release()
        return sent_bytes

    def _run(self, rounds: Sequence[Round]) -> int:
        sent_bytes = 0
        for one in rounds:
            incoming, outgoing = one.receives(), one.sends()
            _all_to_all(self._by_rank(incoming), self._by_rank(outgoing), group=self._process_group)
            one.finish()
            sent_bytes += sum(part.memory.nbytes for part in outgoing)
        return sent_bytes

    def _by_rank(self, slices: Sequence[Slice]) -> list[Tensor]:
        """One tensor for each rank, an empty one for this rank."""
        of_peers = dict(slices)
        like = slices[0].memory
        return [of_peers.get(rank, like[:0]) for rank in range(self._world_size)]
