"""Says at attach what lets ranks train apart by mistake: a group of one rank, parameters that DDP does not know.

What is seen only in a step, ``unreduced_steps`` finds.
"""

from __future__ import annotations

import logging
import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.comm.link import Link
from ddp_crossover.log import first_of, say
from ddp_crossover.torch_internals.ddp import unmanaged_parameters

_ALONE = "DDP's process group has one rank, so nothing is reduced and each process trains on its own, "


def say_what_trains_apart(ddp: DistributedDataParallel, link: Link) -> None:
    """Warn, once for all ranks, of what each of them does by itself."""
    # Each of several processes may be rank 0 of a group of its own.
    if (warning := _why_alone(ddp)) is not None and dist.get_rank() == 0 and os.environ.get("RANK", "0") == "0":
        say(warning, logging.WARNING)
    if (warning := _why_late(ddp)) is not None and link.rank == 0:
        say(warning, logging.WARNING)


def _why_alone(ddp: DistributedDataParallel) -> str | None:
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


def _number_of_processes() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def _why_late(ddp: DistributedDataParallel) -> str | None:
    """What is wrong with trained parameters that DDP does not reduce; None if it reduces all."""
    late = [name for name, parameter in unmanaged_parameters(ddp) if parameter.requires_grad]
    if not late:
        return None
    return (
        f"{first_of(late)} came into the model (moved, cast, replaced or thawed) after DistributedDataParallel was "
        "built, so DDP does not reduce their gradients, with this package as without. Build DistributedDataParallel "
        "after such changes; what is frozen later and thawed again it goes on reducing"
    )
