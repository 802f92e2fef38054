"""Ranks exchange something at the same places, whatever their garbage collectors and references have come to."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from models import INPUTS, DeepNet

_STEPS = 8


def _train(attached: bool, seed: int, *, set_to_none: bool, clips: str, holds: bool) -> list[torch.Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(seed)
    net = DeepNet()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=seed % 2 == 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = dx.attach(ddp, optimizer, fusion_mb=1e-4, shard_optimizer=True) if attached else None
    timing = random.Random(seed + rank)
    held: list[Any] = []

    def pause() -> None:
        if rank == 1 and timing.random() < 0.3:
            gc.collect()

    def clip() -> None:
        if state is not None:
            state.clip_grad_norm_(1e6)
        else:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6)
        pause()

    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(100 * seed + 10 * step + rank)
        ddp(torch.randn(4, INPUTS, generator=generator)).square().mean().backward()
        pause()
        if clips == "before":
            clip()
        optimizer.step()
        pause()
        if clips == "after":
            clip()
        if holds and rank == 1:
            held[:] = [list(net.parameters())[step % 5].detach()]  # a reference that keeps an update from waiting
        optimizer.zero_grad(set_to_none=set_to_none)
        next(net.parameters()).grad = None
        pause()
    if state is not None:
        state.detach()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _compares(options: dict[str, Any]) -> None:
    gc.freeze()  # torch's own objects, which would make a collection take seconds
    if dist.get_rank() == 0:
        gc.disable()
    try:
        for seed in range(2):  # each leaves garbage for the next
            ours, plain = (_train(attached, seed, **options) for attached in (True, False))
            for one, other in zip(ours, plain, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("clips", ["before", "after", "never"])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_ranks_differ_in_references_and_garbage(on_ranks, set_to_none, clips, holds) -> None:
    on_ranks(_compares, 3, {"set_to_none": set_to_none, "clips": clips, "holds": holds}, timeout_s=90)
