"""A script that changes what its optimizer uses right after each `step()`, under plain DDP and attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from equivalence import SMALL_GROUPS_MB
from models import INPUTS, DeepNet

Begin = Callable[[list[Any]], tuple[Any, Callable[[float], object]]]
STEPS = 5


def train_both_ways(begin: Begin, name: object) -> Any:
    """Both train the same bits; returns the statistics of the attached arm.

    `begin` gets the parameters, and returns their optimizer and a function that takes the next value of what the
    optimizer uses.
    """
    plain, _ = _train(begin, attached=False)
    ours, stats = _train(begin, attached=True)
    assert all(map(torch.equal, plain, ours)), name
    return stats


def _train(begin: Begin, attached: bool) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(DeepNet())
    optimizer, change = begin(list(model.parameters()))
    state = dx.attach(model, optimizer, fusion_mb=SMALL_GROUPS_MB) if attached else None
    seen: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(3, INPUTS)).square().sum()
        loss.backward()
        optimizer.step()
        change(0.5 / (step + 2))
        seen.append(loss.detach().clone())
    seen += [p.detach().clone() for p in model.parameters()]
    if state is None:
        return seen, None
    stats = state.stats()
    state.detach()
    return seen, stats
