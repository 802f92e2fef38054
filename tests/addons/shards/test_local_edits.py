"""With shards a parameter that ranks have changed differently is an error on all of them, before it is updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from models import INPUTS, DeepNet

_STEPS = 9
_AT = 6  # in the pipeline, which begins in the third or fourth step


@torch.no_grad()
def _add(p: nn.Parameter) -> None:
    p.add_(0.01)


@torch.no_grad()
def _move_one_element(p: nn.Parameter) -> None:
    p.view(-1)[3] += 1e-6


def _replace(p: nn.Parameter) -> None:
    p.data = p.data + 0.01


def _add_to_data(p: nn.Parameter) -> None:
    p.data.add_(0.01)


class _Training:
    """Two optimizers over a model whose weights come first."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = DeepNet()
        self.ddp = DistributedDataParallel(self.net)
        self.weights = [p for p in self.net.parameters() if p.dim() > 1]
        biases = [p for p in self.net.parameters() if p.dim() == 1]
        self.optimizers = [torch.optim.AdamW(self.weights), torch.optim.SGD(biases, 0.1)]
        self.state = dx.attach(self.ddp, self.optimizers, fusion_mb=1e-4, **options) if options else None

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        self.ddp.zero_grad()
        self.ddp(torch.randn(4, INPUTS, generator=generator)).square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def _one_rank_edits(edit: Callable[[nn.Parameter], None], at: int, reads: bool, strict: bool) -> None:
    training = _Training(shard_optimizer=True, strict=strict)
    for step in range(at):
        training.backward(step)
        training.step()
    training.backward(at)
    if reads:
        assert training.weights[0].grad is not None
        training.weights[0].grad.norm()
    before = [p.detach().clone() for p in training.net.parameters()]
    if dist.get_rank() == 1:
        edit(training.weights[2])
    mine = training.weights[2].detach().clone()
    with pytest.raises(RuntimeError, match=r"4\.weight is not the same on all ranks .* leave out shard_optimizer"):
        training.step()
    for p, value in zip(training.net.parameters(), before, strict=True):
        assert torch.equal(p.detach(), mine if p is training.weights[2] else value), "something was updated"


@pytest.mark.parametrize(
    ("edit", "at", "reads", "strict"),
    [
        (_add, _AT, False, False),
        (_add, 0, False, False),
        (_add, _AT, True, False),  # gradients, so that this step exchanges parameters at once
        (_move_one_element, _AT, False, False),
        (_replace, _AT, False, False),
        (_add_to_data, _AT, False, True),  # raises no version
    ],
)
def test_one_rank_edits_a_parameter(on_ranks, edit, at, reads, strict) -> None:
    on_ranks(_one_rank_edits, 2, edit, at, reads, strict)


def _edits_between_two_optimizers() -> None:
    training = _Training(shard_optimizer=True)
    for step in range(_AT + 1):
        training.backward(step)
        training.optimizers[0].step()
        if step == _AT:
            _add_by_rank(training.net[0].bias)
            with pytest.raises(RuntimeError, match=r"0\.bias is not the same on all ranks"):
                training.optimizers[1].step()
            return
        training.optimizers[1].step()


@torch.no_grad()
def _add_by_rank(p: nn.Parameter) -> None:
    p.add_(0.01 * dist.get_rank())


def test_edits_between_the_steps_of_two_optimizers(on_ranks) -> None:
    on_ranks(_edits_between_two_optimizers, 2)


@torch.no_grad()
def _average(p: nn.Parameter) -> None:
    dist.all_reduce(p)
    p /= dist.get_world_size()


def _average_by_hand(p: nn.Parameter) -> None:
    """On one rank in a way that raises no version, so that the others have written and it has not."""
    mean = p.detach().clone()
    dist.all_reduce(mean)
    (p if dist.get_rank() else p.data).detach().copy_(mean / dist.get_world_size())


@torch.no_grad()
def _clamp(p: nn.Parameter) -> None:
    p.clamp_(-0.1, 0.1)


def _edits_alike(makes_alike: Callable[[nn.Parameter], None]) -> None:
    trained = []
    for options in ({}, {"shard_optimizer": True}):
        training = _Training(**options)
        for step in range(_STEPS):
            training.backward(step)
            if makes_alike is not _clamp:
                _add_by_rank(training.weights[2])
            makes_alike(training.weights[2])
            training.step()
        trained.append([p.detach().clone() for p in training.net.parameters()])
        if training.state is not None:
            assert training.state.stats().deferred_steps > _STEPS // 2
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("makes_alike", [_average, _average_by_hand, _clamp])
def test_edits_that_end_alike_are_exact(on_ranks, makes_alike) -> None:
    on_ranks(_edits_alike, 2, makes_alike)
