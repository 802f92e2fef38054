"""What DeAR is compared with: plain DDP where its sums have one possible order, else DDP with one of these hooks.

Up to two summands there is only one order. From three on, gloo's all-reduce adds in the order of its ring, which
differs from element to element; ddp_crossover adds in rank order. `rank_order_hook` is the smallest thing that does so
too. Nothing here is of the package.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist


def rank_order_hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Mean over ranks as ((g0 + g1) + g2) + ..."""
    return mean_over_ranks(bucket.buffer(), add_in_order, group=group)


def wire_dtype_hook(wire_dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The same with gradients that are cast to `wire_dtype` where they are wider: what is 16 bits wide is added up in
    fp32, in rank order, and the sum rounded once.
    """
    return mean_over_ranks(bucket.buffer(), partial(add_in_order, in_fp32=True), wire_dtype)


def add_in_order(terms: Sequence[torch.Tensor], in_fp32: bool = False) -> torch.Tensor:
    """The sum in the terms' dtype; in fp32, it is rounded to that in the end."""
    total = terms[0].float() if in_fp32 else terms[0].clone()
    for term in terms[1:]:
        total = total + term
    return total.to(terms[0].dtype)


def mean_over_ranks(
    buffer: torch.Tensor,
    add_up: Callable[[list[torch.Tensor]], torch.Tensor],
    wire_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.futures.Future[torch.Tensor]:
    """The sum of what all ranks send, each having scaled its own gradient first, as DDP does, and then cast it."""
    world_size = dist.get_world_size(group)
    sent = torch.mul(buffer, 1.0 / world_size)
    if wire_dtype is not None and wire_dtype.itemsize < buffer.dtype.itemsize:
        sent = sent.to(wire_dtype)
    gathered = [torch.empty_like(sent) for _ in range(world_size)]
    dist.all_gather(gathered, sent, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(add_up(gathered).to(buffer.dtype))
    return future
