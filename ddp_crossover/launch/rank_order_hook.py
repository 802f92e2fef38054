"""Plain DDP whose sums have one order beyond two ranks, to compare with."""
# No `from __future__ import annotations` here: DDP checks the annotations of hooks, and expects types.

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.collectives.all_reduce import family_of
from ddp_crossover.torch_internals.ddp import GradBucket, has_comm_hook

# Up to two summands there is only one order. From three on, gloo adds in the order of its ring, which differs from
# element to element, while ddp_crossover adds in rank order.
_FIRST_AMBIGUOUS_WORLD_SIZE = 3


def has_one_order(ddp: DistributedDataParallel) -> bool:
    """Whether plain DDP adds gradients as we do in any case."""
    return dist.get_world_size(ddp.process_group) < _FIRST_AMBIGUOUS_WORLD_SIZE


def can_add_in_rank_order(ddp: DistributedDataParallel) -> bool:
    """Whether our own sums of this model are in rank order."""
    return family_of(ddp.process_group, next(ddp.parameters()).device) == "gloo"


def add_in_rank_order(ddp: DistributedDataParallel) -> bool:
    """Make DDP add in rank order where its own order differs from ours; returns whether it does so now."""
    if has_one_order(ddp) or not can_add_in_rank_order(ddp) or has_comm_hook(ddp):
        return False
    ddp.register_comm_hook(ddp.process_group, rank_order_hook)
    return True


def rank_order_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the mean as ((g0 + g1) + g2) + ..., each rank having divided its own gradient first."""
    scaled = torch.mul(bucket.buffer(), 1.0 / dist.get_world_size(group))
    gathered = [torch.empty_like(scaled) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, scaled, group=group)
    mean = gathered[0]
    for gradient in gathered[1:]:
        mean.add_(gradient)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(mean)
    return future
