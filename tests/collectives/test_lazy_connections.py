"""`TORCH_GLOO_LAZY_INIT=1`: gloo connects two ranks when they first talk, and training is what it is without."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from harness import run_ranks
from models import INPUTS, DeepNet
from reference import rank_order_hook

STEPS = 8


def _train(options: dict[str, object] | None) -> list[torch.Tensor]:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    torch.manual_seed(3)
    ddp = DistributedDataParallel(DeepNet(), process_group=dist.new_group())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    if options is None:
        ddp.register_comm_hook(None, rank_order_hook)
    else:
        state = dx.attach(ddp, optimizer, fusion_mb=5e-4, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(4, INPUTS, generator=generator)).square().mean().backward()
        optimizer.step()
    if options is not None:
        assert state.stats().pipelined_iterations
        state.detach()
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["plain", "sharded"])
def test_lazy_connections_change_nothing(ranks: int, options: dict[str, object]) -> None:
    plain, *others = run_ranks(_train, ranks, None) + run_ranks(_train, ranks, options)
    for other in others:
        assert all(map(torch.equal, plain, other))
