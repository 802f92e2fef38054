"""Finds the optimizers of a model in a script that has not told us."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.ddp.unwrapping import live_objects
from ddp_crossover.torch_internals.ddp import managed_parameters


def optimizers_of(ddp: DistributedDataParallel) -> list[Optimizer]:
    """Return all optimizers that update parameters of ``ddp``, in the same order on all ranks.

    Of an optimizer and one that wraps it (a look-ahead, a framework's), the one inside: its ``step()`` updates.
    """
    index_of = {id(parameter): index for index, (_, parameter) in enumerate(managed_parameters(ddp))}
    found = [
        (indices, thing)
        for thing in live_objects(Optimizer)
        if (indices := [index_of[key] for key in _keys_of(thing) if key in index_of])
    ]
    ids = {id(optimizer) for _, optimizer in found}
    inside = [
        (indices, optimizer)
        for indices, optimizer in found
        if not any(id(value) in ids and value is not optimizer for value in vars(optimizer).values())
    ]
    return [optimizer for _, optimizer in sorted(inside, key=lambda one: (one[0], type(one[1]).__name__))]


def _keys_of(optimizer: Optimizer) -> list[int]:
    try:
        return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    except Exception:  # a wrapper may raise when it is asked before it is ready
        return []
