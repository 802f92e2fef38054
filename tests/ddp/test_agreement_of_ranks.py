"""Ranks that were set up differently are told so at attach: which rank, and in what."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models import DeepNet, OddNet

ODD_RANK = 2


def _odd() -> bool:
    return dist.get_rank() == ODD_RANK


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _other_fusion_mb() -> dict[str, Any]:
    return {"fusion_mb": 2.0 if _odd() else 1.0}


def _other_schedule() -> dict[str, Any]:
    return {"schedule": "allreduce" if _odd() else "dear"}


def _other_wire_dtype() -> dict[str, Any]:
    return {"wire_dtype": None if _odd() else torch.bfloat16}


def _other_optimizer() -> dict[str, Any]:
    model = DistributedDataParallel(OddNet())
    kind = torch.optim.AdamW if _odd() else torch.optim.SGD
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.1)}


def _other_param_groups() -> dict[str, Any]:
    model = DistributedDataParallel(OddNet())
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest}] if _odd() else [{"params": [first, *rest]}]
    return {"model": model, "optimizer": torch.optim.SGD(groups, lr=0.1)}


def _other_parameters_in_the_optimizer() -> dict[str, Any]:
    model = DistributedDataParallel(OddNet())
    parameters = list(model.parameters())
    return {
        "model": model,
        "optimizer": torch.optim.SGD(parameters[1:] if _odd() else parameters, lr=0.1),
    }


def _other_names() -> dict[str, Any]:
    """The same shapes, so that DDP itself does not notice."""
    net = nn.Sequential()
    names = ["head", "body"] if _odd() else ["body", "head"]
    for name in names:
        net.add_module(name, nn.Linear(3, 3))
    return {"model": DistributedDataParallel(net)}


def _other_number_of_optimizers() -> dict[str, Any]:
    model = DistributedDataParallel(DeepNet())
    first, *rest = model.parameters()
    parts = [[first], rest] if _odd() else [[first, *rest]]
    return {"model": model, "optimizer": [torch.optim.SGD(part, lr=0.1) for part in parts]}


def _attach(setting: Callable[[], dict[str, Any]]) -> str | None:
    import ddp_crossover as dx

    options = setting()
    model = options.pop("model", None) or DistributedDataParallel(OddNet())
    optimizer = options.pop("optimizer", None) or _sgd(model)
    try:
        dx.attach(model, optimizer, **options)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("setting", "difference"),
    [
        (_other_fusion_mb, "fusion_mb"),
        (_other_schedule, "schedule"),
        (_other_wire_dtype, "wire_dtype"),
        (_other_optimizer, "AdamW|SGD"),
        (_other_param_groups, "optimizer|group"),
        (_other_parameters_in_the_optimizer, "optimizer|parameter"),
        (_other_names, "body|head"),
        (_other_number_of_optimizers, "optimizer"),
    ],
)
def test_every_rank_is_told_which_rank_differs_and_in_what(on_ranks, setting, difference) -> None:
    for message in on_ranks(_attach, 3, setting):
        assert message is not None, "not found at attach"
        assert re.search(rf"rank {ODD_RANK}\b", message), message
        assert re.search(difference, message), message
