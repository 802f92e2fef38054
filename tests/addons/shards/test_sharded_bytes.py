"""A sharded optimizer sends as many bytes as an all-reduce, however its updates are divided."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from harness import run_ranks

pytestmark = pytest.mark.launches


def _bytes_per_step(sharded: bool, fusion_mb: float) -> float:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
    ddp = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(ddp.parameters())
    state = dx.attach(ddp, optimizer, shard_optimizer=sharded, fusion_mb=fusion_mb)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            ddp(torch.randn(4, 96)).square().sum().backward()
            optimizer.step()
        state.synchronize()

    steps(8)
    before = state.stats().sent_bytes
    steps(5)
    return (state.stats().sent_bytes - before) / 5


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("fusion_mb", [0.01, 10.0])
def test_no_more_than_an_all_reduce(world_size: int, fusion_mb: float) -> None:
    gradients = 4 * 6 * (96 * 96 + 96)
    wanted = 2 * (world_size - 1) / world_size * gradients
    sharded = sum(run_ranks(_bytes_per_step, world_size, True, fusion_mb)) / world_size
    unsharded = sum(run_ranks(_bytes_per_step, world_size, False, fusion_mb)) / world_size
    assert unsharded == pytest.approx(wanted, rel=1e-3)
    # One number of 8 bytes for each peer and step, to agree on what gather legs carry.
    assert sharded == pytest.approx(unsharded + 8 * (world_size - 1), abs=1)
