"""Lets gradients reach the hook early, by giving DDP smaller buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.torch_internals.ddp import bucket_cap_bytes, has_run_forward, rebuild_buckets

# Size of DDP's buckets: small enough that gradients reach the hook early, and not too many of them, because each hook
# call costs tens of microseconds.
_ARRIVAL_BYTES = 2**20
_MAX_BUCKETS = 256


def let_gradients_arrive_early(
    ddp: DistributedDataParallel, named: Sequence[tuple[str, torch.nn.Parameter]]
) -> Callable[[], None] | None:
    """Give DDP smaller buckets, because a gradient reaches the hook only when its whole bucket is complete.

    The planner decides which gradients travel together, so DDP's buckets of 25 MiB would only cost overlap.

    Returns:
        A callback for the beginning of the next forward: until then, backward is refused. None if it is not refused.
    """
    total_bytes = sum(parameter.nbytes for _, parameter in named)
    cap_bytes = max(_ARRIVAL_BYTES, total_bytes // _MAX_BUCKETS)
    if cap_bytes < bucket_cap_bytes(ddp):
        rebuild_buckets(ddp, cap_bytes)
        if not has_run_forward(ddp):
            return None
        return _refuse_backward_of_earlier_forward(ddp, [parameter for _, parameter in named])
    return None


def _refuse_backward_of_earlier_forward(
    ddp: DistributedDataParallel, parameters: Sequence[Tensor]
) -> Callable[[], None]:
    """Refuse the backward of an earlier forward, because DDP's new reducer would not reduce its gradients.

    Returns:
        A callback that allows backward again.
    """

    def refuse(gradient: Tensor) -> NoReturn:
        raise RuntimeError(
            "dear_hook was attached between a forward and its backward, whose gradients DDP would not reduce: "
            "attach before the forward"
        )

    def allow(*_: object) -> None:
        for handle in handles:
            handle.remove()

    handles = [parameter.register_hook(refuse) for parameter in parameters]
    handles.append(ddp.register_forward_pre_hook(torch.compiler.disable(allow)))  # also works after detach()
    return allow
