"""Ranks that were set up differently are told so at attach: which rank, and in what."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models import INPUTS, DeepNet, OddNet

ODD_RANK = 2


def _odd() -> bool:
    return dist.get_rank() == ODD_RANK


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _with(kind: Callable[..., torch.optim.Optimizer], first: int = 0) -> dict[str, Any]:
    model = DistributedDataParallel(OddNet())
    return {"model": model, "optimizer": kind(list(model.parameters())[first:])}


def _other_param_groups() -> dict[str, Any]:
    model = DistributedDataParallel(OddNet())
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest}] if _odd() else [{"params": [first, *rest]}]
    return {"model": model, "optimizer": _sgd(groups)}


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
    return {"model": model, "optimizer": [_sgd(part) for part in parts]}


# What this rank gives to attach, and what its name is in the error.
SETTINGS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "fusion_mb": (lambda: {"fusion_mb": 2.0 if _odd() else 1.0}, "fusion_mb"),
    "schedule": (lambda: {"schedule": "allreduce" if _odd() else "dear"}, "schedule"),
    "wire dtype": (lambda: {"wire_dtype": None if _odd() else torch.bfloat16}, "wire_dtype"),
    "norms": (lambda: {"norms": "exact" if _odd() else "sharded"}, "norms"),
    "optimizer": (lambda: _with(torch.optim.AdamW if _odd() else torch.optim.SGD), "AdamW|SGD"),
    "param groups": (_other_param_groups, "optimizer|group"),
    "parameters in the optimizer": (lambda: _with(_sgd, first=1 if _odd() else 0), "optimizer|parameter"),
    "names": (_other_names, "body|head"),
    "number of optimizers": (_other_number_of_optimizers, "optimizer"),
}


def _attach(name: str) -> str | None:
    import ddp_crossover as dx

    options = SETTINGS[name][0]()
    model = options.pop("model", None) or DistributedDataParallel(OddNet())
    optimizer = options.pop("optimizer", None) or _sgd(model.parameters())
    try:
        dx.attach(model, optimizer, **options)
    except dx.DisagreementError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SETTINGS)
def test_every_rank_is_told_which_rank_differs_and_in_what(on_ranks, name) -> None:
    for message in on_ranks(_attach, 3, name):
        assert message is not None, "not found at attach"
        assert re.search(rf"rank {ODD_RANK}\b", message), message
        assert re.search(SETTINGS[name][1], message), message


def _trains_in_any_order(options: dict[str, Any] | None) -> list[torch.Tensor]:
    """The order of a set of parameters is another one on each rank."""
    import ddp_crossover as dx

    torch.manual_seed(0)
    model = DistributedDataParallel(DeepNet())
    parameters = list(model.parameters())
    random.Random(dist.get_rank()).shuffle(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    state = None if options is None else dx.attach(model, optimizer, fusion_mb=1e-3, **options)
    for step in range(8):
        x = torch.randn(4, INPUTS, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if state is not None:
        state.consolidate()
        assert state.stats().deferred_steps
        state.detach()
    return [p.detach().clone() for p in model.parameters()] + [
        optimizer.state[p]["exp_avg"].clone() for p in model.parameters()
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"shard_optimizer": True}],
    ids=["default", "shards"],
)
def test_the_order_of_parameters_in_the_optimizer_may_differ(on_ranks, options) -> None:
    expected = on_ranks(_trains_in_any_order, 2, None)
    for one, other in zip(on_ranks(_trains_in_any_order, 2, options), expected, strict=True):
        assert all(map(torch.equal, one, other))
