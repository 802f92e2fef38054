"""Tells whether a process trains alone by mistake: as the one rank of DDP's group, beside others that were started."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_ALONE = "DDP's process group has one rank, so nothing is reduced and each process trains on its own, "


def why_alone(ddp: DistributedDataParallel) -> str | None:
    """Why the only rank of a model's process group need not be meant to be the only one; None if it is."""
    if (started := _number_of_processes()) > dist.get_world_size() == 1:
        return (
            f"{_ALONE}although {started} were started (WORLD_SIZE in the environment): leave out rank= and world_size= "
            "of init_process_group(), which a launcher sets, unless that is meant"
        )
    if dist.get_world_size() > dist.get_world_size(ddp.process_group) == 1:
        return (
            f"{_ALONE}although there are {dist.get_world_size()} ranks: leave out process_group= of "
            "DistributedDataParallel, unless that is meant"
        )
    return None


def is_first_process() -> bool:
    """Whether this is the first of all processes that were started; each may be rank 0 of a group of its own."""
    return dist.get_rank() == 0 and os.environ.get("RANK", "0") == "0"


def _number_of_processes() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1
