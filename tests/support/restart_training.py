"""A training script in parts, for tests that end it and go on with it in other processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from models import DeepNet

ALL_STEPS = 14


class Training(NamedTuple):
    """One rank's objects, as its script would hold them."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    state: dx.DearState | None


def build(attach: bool, load: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None) -> Training:
    torch.manual_seed(7)
    net = DeepNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if load is not None:
        load(net, optimizer)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    return Training(ddp, optimizer, dx.attach(ddp, optimizer) if attach else None)


def train(training: Training, first: int, end: int) -> None:
    for step in range(first, end):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        training.optimizer.zero_grad()
        x = torch.randn(4, next(training.ddp.parameters()).shape[1], generator=generator)
        training.ddp(x).square().mean().backward()
        training.optimizer.step()


def end(training: Training) -> dict[str, Any]:
    return {"model": training.ddp.module.state_dict(), "optimizer": training.optimizer.state_dict()}


def save(training: Training, directory: str) -> None:
    saved = end(training)
    if dist.get_rank() == 0:
        torch.save(saved, os.path.join(directory, "all.pt"))
    dist.barrier()


def load(directory: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved = torch.load(os.path.join(directory, "all.pt"))
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
