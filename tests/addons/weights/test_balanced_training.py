"""Balance in training: real ranks, one of them slow, with DataLoader workers; exact, and resumed."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import re
import time
from collections.abc import Iterator
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


class Job:
    """A rank's training, whose state balances its sampler."""

    def __init__(self, saved: dict[str, Any] | None = None, **dear: Any) -> None:
        multiprocessing.current_process()._config["daemon"] = False  # else it may have no workers
        self.data = _data()
        self.ddp = DistributedDataParallel(_net())
        self.optimizer = sgd(self.ddp.parameters())
        self.sampler = dx.BalancedSampler(self.data, GLOBAL_BATCH)
        self.parts: dict[str, Any] = {"sampler": self.sampler, "model": self.ddp.module, "optimizer": self.optimizer}
        for name, state in (saved or {}).items():
            self.parts[name].load_state_dict(state)
        self.state = dx.attach(self.ddp, self.optimizer, weighted=True, **({"fusion_mb": 1e-4} | dear))
        self.state.balance(self.sampler)
        self.sizes: list[int] = []

    def train(self, epoch: int, workers: int = 0) -> Iterator[int]:
        """The numbers of batches, each after it was trained on."""
        self.sampler.set_epoch(epoch)
        loader = DataLoader(self.data, batch_sampler=self.sampler, num_workers=workers)
        for batch, (x, y) in enumerate(loader):
            self.optimizer.zero_grad()
            with self.state.batch(len(x)):
                nn.functional.mse_loss(self.ddp(x), y).backward()
            self.optimizer.step()
            self.sizes.append(len(x))
            yield batch

    def save(self) -> dict[str, Any]:
        return copy.deepcopy({name: part.state_dict() for name, part in self.parts.items()})

    def end(self, epochs: int) -> None:
        """It has learned what one process would have."""
        self.state.detach()
        alone = _alone(dist.get_world_size(), epochs)
        for ours, other in zip(self.ddp.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), other.detach(), rtol=1e-12, atol=1e-12)


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


def _train(workers: int, dear: dict[str, Any]) -> list[int]:
    job = Job(**dear)
    job.ddp.module[2].register_forward_pre_hook(_slow)
    balanced_epochs = 0
    for epoch in range(MAX_EPOCHS):
        for _ in job.train(epoch, workers):
            pass
        balanced_epochs += job.sampler.sizes()[-1] <= BALANCED
        if balanced_epochs == 4:  # by then it has settled
            break
    assert (job.state.stats().pipelined_iterations > 0) == ("schedule" not in dear)
    job.end(epoch + 1)
    return job.sizes


# Workers start anew in each epoch, so they take most of a minute.
@pytest.mark.parametrize("workers", often([0, 2], 0))
@pytest.mark.parametrize("dear", [{}, {"schedule": "allreduce"}], ids=["pipeline", "plain"])
def test_a_slow_rank_gets_fewer_samples_and_training_stays_exact(on_ranks, workers, dear) -> None:
    fast, slow = on_ranks(_train, 2, workers, dear)
    assert all(one + other == GLOBAL_BATCH for one, other in zip(fast, slow, strict=True))
    assert fast[0] == slow[0] == GLOBAL_BATCH // 2
    assert slow[-1] <= BALANCED, slow


def _save_and_resume() -> None:
    job = Job()
    job.ddp.module[2].register_forward_pre_hook(_slow)
    for epoch in range(4):
        for batch in job.train(epoch):
            if (epoch, batch) == (2, 4):
                saved = job.save()
    job.end(4)
    again = Job(saved)
    for epoch in range(2, 4):
        for _ in again.train(epoch):
            pass
    assert again.sizes[0] == job.sizes[25], "it goes on with the shares that it had"
    again.end(4)


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
