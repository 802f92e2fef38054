"""Checks at attach that model, optimizers and options are the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from ddp_crossover.comm.agreement import require_equal
from ddp_crossover.comm.link import Link
from ddp_crossover.options import Options
from ddp_crossover.walks import is_tree
from ddp_crossover.watching.optimizer_snapshot import hyperparameters
from ddp_crossover.watching.values import parts_of


def require_same_setup(
    link: Link,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    optimizers: Sequence[Optimizer],
    options: Options,
) -> None:
    """Raise :class:`DisagreementError` on every rank unless model, optimizers and options are the same on all."""
    name_of = {str(id(parameter)): name for name, parameter in named}
    setup = {
        "options": options.shared_by_ranks(),
        "parameters": {name: f"{tuple(parameter.shape)} {parameter.dtype}" for name, parameter in named},
        "order of parameters": [name for name, _ in named],
        "optimizers": [
            {
                "type": type(optimizer).__name__,
                "param_groups": [
                    {
                        # In any order: some optimizers make a set of them.
                        "params": sorted(name_of.get(str(id(p)), "not in the model") for p in group["params"]),
                        **{key: _comparable(value, name_of) for key, value in hyperparameters(group).items()},
                    }
                    for group in optimizer.param_groups
                ],
            }
            for optimizer in optimizers
        ],
    }
    require_equal("setup", setup, link.process_group, named[0][1].device)


def _comparable(value: object, name_of: Mapping[str, str]) -> object:
    """Convert a hyperparameter to a value that is equal on two ranks if it means the same: an ``id()`` to the name."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if value is None or isinstance(value, (bool, int, float, str)):
        return name_of.get(str(value), str(value))
    if isinstance(value, (list, tuple)) and is_tree(value, parts_of):
        return [_comparable(item, name_of) for item in value]
    return type(value).__name__  # functions and objects differ between ranks, at least in their address
