"""What DeAR is compared with: plain DDP where its sums have one possible order, else DDP with this
hook.

Up to two summands there is only one order. From three on, gloo's all-reduce adds in the order of
its ring, which differs from element to element; ddp_crossover adds in rank order. `rank_order_hook`
is the smallest thing that does so too.
"""

import torch
import torch.distributed as dist


def rank_order_hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Mean over ranks as ((g0 + g1) + g2) + ..., each rank having scaled its own gradient first, as
    DDP does.
    """
    world_size = dist.get_world_size(group)
    scaled = torch.mul(bucket.buffer(), 1.0 / world_size)
    gathered = [torch.empty_like(scaled) for _ in range(world_size)]
    dist.all_gather(gathered, scaled, group=group)
    mean = gathered[0]
    for gradient in gathered[1:]:
        mean = mean.add_(gradient)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(mean)
    return future


def wire_dtype_hook(wire_dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The same with gradients that are cast to `wire_dtype` where they are wider: what is 16 bits wide
    is added up in fp32, in rank order, and the sum rounded once.
    """
    buffer = bucket.buffer()
    world_size = dist.get_world_size()
    scaled = torch.mul(buffer, 1.0 / world_size)
    sent = scaled.to(wire_dtype) if wire_dtype.itemsize < buffer.dtype.itemsize else scaled
    gathered = [torch.empty_like(sent) for _ in range(world_size)]
    dist.all_gather(gathered, sent)
    total = gathered[0].float()
    for gradient in gathered[1:]:
        total = total + gradient.float()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(total.to(sent.dtype).to(buffer.dtype))
    return future
