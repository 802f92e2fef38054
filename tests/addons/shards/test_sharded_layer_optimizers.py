"""LARS and LAMB with sharded state: the bits of every rank, and those of one process with the mean gradient.

Other loops with them the fuzzer draws (`optimizer`).
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from equivalence import Case, check_case
from harness import run_ranks
from models import INPUTS, OUTPUTS, DeepNet

LARS = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02}
LAMB = {"lr": 0.01, "weight_decay": 0.01}


def optimizer_of(module: nn.Module, name: str) -> torch.optim.Optimizer:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    rest = {"params": [p for p in module.parameters() if p.dim() <= 1], "adapt": False, "weight_decay": 0.0}
    kind, options = {"LARS": (dx.optim.LARS, LARS), "LAMB": (dx.optim.LAMB, LAMB)}[name]
    return kind([{"params": matrices}, rest], **options)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_as_plain_ddp(on_ranks, name: str, world_size: int) -> None:
    case = Case(
        model=DeepNet,
        optimizer=partial(optimizer_of, name=name),
        world_size=world_size,
        dear={"shard_optimizer": True},
    )
    check_case(case, on_ranks)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, INPUTS, generator=generator), torch.randn(4, OUTPUTS, generator=generator)


def _sharded(name: str, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(DeepNet())
    optimizer = optimizer_of(ddp, name)
    dx.attach(ddp, optimizer, shard_optimizer=True, fusion_mb=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(dist.get_rank(), step)
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def in_one_process(name: str, steps: int, world_size: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    network = DeepNet()
    optimizer = optimizer_of(network, name)
    for step in range(steps):
        sums = [torch.zeros_like(p) for p in network.parameters()]
        for rank in range(world_size):
            x, y = batch(rank, step)
            loss = nn.functional.mse_loss(network(x), y)
            for total, gradient in zip(sums, torch.autograd.grad(loss, list(network.parameters())), strict=True):
                total += gradient / world_size
        for p, total in zip(network.parameters(), sums, strict=True):
            p.grad = total
        optimizer.step()
    return [p.detach().clone() for p in network.parameters()]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_as_one_process(name: str, world_size: int) -> None:
    # Divided by 2 or 4, which is exact, and added in rank order: the same bits.
    expected = in_one_process(name, 10, world_size)
    for parameters in run_ranks(_sharded, world_size, name, 10):
        assert all(map(torch.equal, parameters, expected))
