"""What plain DDP, which weights ranks equally, can do with weighted batches: those of equal sizes, equally many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.ddp.weighted_batches import checked_count

_END = object()
_WAY_OUT = "attach with weighted=True, without DDP_CROSSOVER=off, or give all ranks equal batches"


def batches_of_equal_ranks(loader: Iterable[Any], ddp: DistributedDataParallel, device: torch.device) -> Iterator[Any]:
    """Yield the batches of ``loader``; plain DDP cannot train with a rank that has none.

    Raises:
        RuntimeError: on all ranks, when some have a batch and others have none.
    """
    iterator = iter(loader)
    while True:
        batch = next(iterator, _END)
        least, most = _least_and_most(int(batch is not _END), ddp, device)
        if least != most:
            raise RuntimeError(
                "state.batches(): some ranks have no batch left, and the model is not attached, so DDP would wait for "
                f"them: {_WAY_OUT}"
            )
        if not most:
            return
        yield batch


def require_equal(count: int, ddp: DistributedDataParallel, device: torch.device) -> None:
    """Check that plain DDP, which weights ranks equally, is right for a batch of ``count`` samples.

    Raises:
        RuntimeError: on all ranks, if they have different counts.
    """
    least, most = _least_and_most(checked_count(count), ddp, device)
    if least != most:
        raise RuntimeError(
            f"ranks have from {least} to {most} samples in this batch, and the model is not attached, so DDP would "
            f"weight ranks equally: {_WAY_OUT}"
        )


def _least_and_most(number: int, ddp: DistributedDataParallel, device: torch.device) -> tuple[int, int]:
    least_and_most = torch.tensor([-number, number], device=device)
    dist.all_reduce(least_and_most, dist.ReduceOp.MAX, group=ddp.process_group)
    least, most = least_and_most.tolist()
    return -least, most
