"""Bugs of other gradient pipelines, each of which this one must not have.

Those that show in the numbers alone the fuzzer draws: `wired`, `grouped`, `forwards`, `second`, `dtype`, `mixed`, and
in every program that the first updates and the last one are made.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import models
from equivalence import Case, Run


def _bytes_sent_per_step(accumulation: int) -> float:
    case = Case(model=models.DeepNet, steps=10 * accumulation)
    run = Run(case, with_dear=True)
    for index, (x, y) in enumerate(run.batches()):
        if (index + 1) % accumulation:
            with run.model.no_sync():
                run.loss(run.model(x), y).backward()
        else:
            run.loss(run.model(x), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    run.synchronize()
    stats = run.state.stats()
    run.detach()
    assert stats.iterations == 10
    return stats.sent_bytes / stats.iterations


def test_accumulation_communicates_once_per_step(on_ranks) -> None:
    """DeAR's code: five accumulated micro-batches reduce-scatter five times instead of once."""
    assert on_ranks(_bytes_sent_per_step, 2, 5) == on_ranks(_bytes_sent_per_step, 2, 1)


class AlignedNet(nn.Module):
    """Every size divides by every world size up to 4."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(models.INPUTS, 24)
        self.head = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.lift(x)))[:, : models.OUTPUTS]


def _bytes_sent_by_one_aligned_step() -> int:
    run = Run(Case(model=AlignedNet, dear={"fusion_mb": 25}), with_dear=True)
    sent = []
    for x, y in run.batches():
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        run.optimizer.step()
        run.synchronize()
        sent.append(run.state.stats().sent_bytes)
    run.detach()
    return sent[-1] - sent[-2]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_padding_where_sizes_divide_by_the_world_size(on_ranks, world_size) -> None:
    """DeAR's code: a full extra `world_size` of padding when already aligned."""
    elements = sum(p.numel() for p in AlignedNet().parameters())
    optimum = 2 * (world_size - 1) * elements * 4 // world_size
    assert on_ranks(_bytes_sent_by_one_aligned_step, world_size) == [optimum] * world_size
