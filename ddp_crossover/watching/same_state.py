"""Gives all ranks one rank's optimizer state, where each has had its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.comm.agreement import all_gather_json
from ddp_crossover.watching.optimizer_snapshot import optimizer_parameters


@torch.no_grad()
def take_state_of_rank_0(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """Overwrite the optimizers' state with that of rank 0 of ``group``. A collective.

    Args:
        optimizers: with the same parameters on all ranks.
        parameters: those of the model, in the same order on all ranks.
        group: the ranks.

    Raises:
        RuntimeError: on all ranks, if some have state that others lack.
    """
    device = parameters[0].device
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    states = [
        optimizer.state.get(p, {})
        for optimizer in optimizers
        for p in sorted(optimizer_parameters(optimizer), key=lambda p: place.get(id(p), len(place)))
    ]
    of_ranks = all_gather_json([_shape(state) for state in states], group, device)
    if any([_names(one) for one in other] != [_names(one) for one in of_ranks[0]] for other in of_ranks):
        raise RuntimeError(
            "ranks have different kinds of optimizer state, so it cannot be made the same: call optimizer.step() on "
            "all ranks before, or load one rank's optimizer.state_dict() on all of them"
        )
    for state, of_rank_0 in zip(states, of_ranks[0], strict=True):
        for name, value in of_rank_0.items():
            if isinstance(state[name], Tensor):
                sent = state[name].to(device).contiguous()
                dist.broadcast(sent, group=group, group_src=0)
                state[name].copy_(sent)
            elif value is not None:
                state[name] = value


def _shape(state: dict[str, Any]) -> dict[str, Any]:
    """What ranks compare: the shapes of tensors, and numbers as they are."""
    return {
        name: list(value.shape)
        if isinstance(value, Tensor)
        else value
        if isinstance(value, (bool, int, float))
        else None
        for name, value in sorted(state.items())
    }


def _names(shape: dict[str, Any]) -> dict[str, Any]:
    """The same without numbers, in which ranks may differ."""
    return {name: value if isinstance(value, list) else None for name, value in shape.items()}
