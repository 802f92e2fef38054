"""Checks at attach whether ranks can train alone for some steps. Errors name what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def refuse_options(options: Mapping[str, object], *, has_warmup: bool) -> None:
    """Raise ValueError for options of exact steps that relaxed training does not have."""
    if options.get("weighted"):
        raise ValueError(
            "sync= takes the mean of what ranks have learned, with equal weights: leave out weighted=, and give all "
            "ranks batches of one size"
        )
    if options.get("lease") is not None:
        raise ValueError(
            "sync= holds no lease in local steps: leave out lease=, and call lease.instrument(model, optimizer)"
        )
    if options and not has_warmup:
        raise ValueError(
            f"{', '.join(options)}: for the exact steps of a warm-up, of which warmup=0 has none: leave it out, or set "
            "warmup= of the policy"
        )


def refuse_talk_in_local_steps(ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError for a setup in which ranks would talk in local steps, or see gradients that are not theirs."""
    if ddp.broadcast_buffers and any(True for _ in ddp.module.buffers()):
        raise ValueError(
            "sync= trains ranks alone for some steps, and DDP broadcasts buffers, such as running statistics, in each "
            "forward: build DistributedDataParallel(..., broadcast_buffers=False)"
        )
    if ddp.find_unused_parameters:
        raise ValueError(
            "sync= trains ranks alone for some steps, and with find_unused_parameters=True DDP asks all ranks in each "
            "backward which parameters were used: build DistributedDataParallel without it"
        )
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in ddp.module.modules()):
        raise ValueError(
            "sync= trains ranks alone for some steps, and SyncBatchNorm talks to all ranks in each forward: use "
            "BatchNorm, or a normalization without statistics of a batch"
        )
    if any(isinstance(optimizer, ZeroRedundancyOptimizer) for optimizer in optimizers):
        raise ValueError(
            "sync= trains ranks alone for some steps, and ZeroRedundancyOptimizer has each rank update a part of the "
            "parameters for all: use the optimizer that it wraps"
        )
