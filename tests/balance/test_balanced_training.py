"""Balance in training: real ranks, one of them slow, with DataLoader workers; exact, and resumed."""

from __future__ import annotations

import itertools
import multiprocessing
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddp_crossover as dx
from matrix import often
from models import INPUTS, OUTPUTS, DeepNet
from weighted_loops import sgd

SAMPLES = 320
GLOBAL_BATCH = 32
MAX_EPOCHS = 20
BALANCED = 12  # the slow rank has at most so many samples; 8 is its best share
PER_SAMPLE_S = 0.001


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(SAMPLES, OUTPUTS, generator=generator, dtype=torch.float64))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return DeepNet().double()


def _slow(module: nn.Module, inputs: Any) -> None:
    """Takes three times as long on rank 1."""
    time.sleep((1 + 2 * dist.get_rank()) * PER_SAMPLE_S * len(inputs[0]))


def _train(workers: int, dear: dict[str, Any], stop_at: tuple[int, int] | None = None) -> dict[str, Any]:
    world_size = dist.get_world_size()
    ddp = DistributedDataParallel(_net())
    ddp.module[2].register_forward_pre_hook(_slow)
    multiprocessing.current_process()._config["daemon"] = False  # else it may have no workers
    optimizer = sgd(ddp.parameters())
    data = _data()
    sampler = dx.BalancedSampler(data, GLOBAL_BATCH)
    state = dx.attach(ddp, optimizer, weighted=True, **({"fusion_mb": 1e-4} | dear))
    state.balance(sampler)
    sizes = []
    saved = None
    balanced_epochs = 0
    epochs = MAX_EPOCHS if stop_at is None else 4
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
        for batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            with state.batch(len(x)):
                nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
            if (epoch, batch) == stop_at:
                saved = {
                    "sampler": sampler.state_dict(),
                    "model": {name: value.clone() for name, value in ddp.module.state_dict().items()},
                    "optimizer": {i: one["momentum_buffer"].clone() for i, one in enumerate(optimizer.state.values())},
                }
        balanced_epochs += sampler.sizes()[-1] <= BALANCED
        if stop_at is None and balanced_epochs == 4:  # by then it has settled
            epochs = epoch + 1
            break
    if stop_at is None:  # else it may end before the shares have settled, after which the plan is made
        assert (state.stats().pipelined_iterations > 0) == ("schedule" not in dear)
    state.detach()
    alone = _alone(world_size, epochs)
    for ours, other in zip(ddp.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), other.detach(), rtol=1e-12, atol=1e-12)
    return {"sizes": sizes, "saved": saved}


def _alone(world_size: int, epochs: int) -> nn.Module:
    """The same training in one process."""
    net = _net()
    optimizer = sgd(net.parameters())
    data = _data()
    samplers = [dx.BalancedSampler(data, GLOBAL_BATCH, rank=rank, world_size=world_size) for rank in range(world_size)]
    for epoch in range(epochs):
        for one in samplers:
            one.set_epoch(epoch)
        for parts in zip(*samplers, strict=True):
            x, y = data[list(itertools.chain(*parts))]
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    return net


# Workers start anew in each epoch, so they take most of a minute.
@pytest.mark.parametrize("workers", often([0, 2], 0))
@pytest.mark.parametrize("dear", [{}, {"schedule": "allreduce"}], ids=["pipeline", "plain"])
def test_a_slow_rank_gets_fewer_samples_and_training_stays_exact(on_ranks, workers, dear) -> None:
    fast, slow = (one["sizes"] for one in on_ranks(_train, 2, workers, dear))
    assert all(one + other == GLOBAL_BATCH for one, other in zip(fast, slow, strict=True))
    assert fast[0] == slow[0] == GLOBAL_BATCH // 2
    assert slow[-1] <= BALANCED, slow


def _save_and_resume() -> None:
    result = _train(0, {}, stop_at=(2, 4))
    saved = result["saved"]
    data = _data()
    sampler = dx.BalancedSampler(data, GLOBAL_BATCH)
    sampler.load_state_dict(saved["sampler"])
    ddp = DistributedDataParallel(_net())
    ddp.module.load_state_dict(saved["model"])
    optimizer = sgd(ddp.parameters())
    for parameter, momentum in zip(ddp.parameters(), saved["optimizer"].values(), strict=True):
        optimizer.state[parameter]["momentum_buffer"] = momentum
    state = dx.attach(ddp, optimizer, weighted=True, fusion_mb=1e-4)
    state.balance(sampler)
    sizes = []
    for epoch in range(2, 4):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_sampler=sampler):
            optimizer.zero_grad()
            with state.batch(len(x)):
                nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
    state.detach()
    assert sizes[0] == result["sizes"][25], "it goes on with the shares that it had"
    for ours, other in zip(ddp.module.parameters(), _alone(2, 4).parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), other.detach(), rtol=1e-12, atol=1e-12)


def test_it_is_resumed_in_the_middle_of_an_epoch(on_ranks) -> None:
    on_ranks(_save_and_resume, 2)


def _refused() -> list[str]:
    said = []
    ddp = DistributedDataParallel(_net())
    state = dx.attach(ddp, sgd(ddp.parameters()), weighted=True)
    for sampler in (
        dx.BalancedSampler(100, 10, rank=0, world_size=3),
        dx.BalancedSampler(100, 10),
        dx.BalancedSampler(100, 10),
    ):
        try:
            state.balance(sampler)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    state.detach()
    return said


def test_a_sampler_for_other_ranks_and_a_second_one_are_refused(on_ranks) -> None:
    for ranks, second in on_ranks(_refused, 2):
        assert re.search(r"that of rank 0 of 3, and the model has rank \d of 2: give the sampler rank=", ranks)
        assert "called before" in second
