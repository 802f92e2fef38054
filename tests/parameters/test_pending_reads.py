"""Readers and users of parameters and gradients that nobody announced: late, early, or never looking.

Each of these once was the only thing between a line of the package and its absence.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equivalence import SGD, Case, Run, check_case, plain_loop, snapshot
from models import HIDDEN, INPUTS, OUTPUTS, DeepNet
from wirings import HalfUsedNet

LATE = 4  # long after the first forwards have been watched

pytestmark = pytest.mark.quick


class LateOwnerNet(nn.Module):
    """`tied` reads the weight of `owner`, which is called by itself only later on, and first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.owner = nn.Linear(HIDDEN, HIDDEN)
        self.tied = _Reader()
        self.head = nn.Linear(HIDDEN, OUTPUTS)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.first(x))
        if self.calls > LATE:
            x = torch.tanh(self.owner(x))
        return self.head(self.tied(x, self.owner))


class _Reader(nn.Module):
    def forward(self, x: torch.Tensor, owner: nn.Linear) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, owner.weight, owner.bias))


def test_an_owner_called_late_has_its_update(on_ranks) -> None:
    check_case(Case(model=LateOwnerNet), on_ranks)


def _hold_without_looking(run: Run) -> Iterator[Any]:
    held: list[torch.Tensor] = []
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        before, held = held, [p.grad for p in run.model.module.parameters()]
        run.optimizer.step()
        # First looked at when the next backward has long used the buffers again.
        yield loss, snapshot(before)


def test_gradients_held_over_a_step_keep_their_values(on_ranks) -> None:
    ddp = {"gradient_as_bucket_view": False}  # with bucket views DDP itself overwrites them
    check_case(Case(_hold_without_looking, model=DeepNet, ddp=ddp), on_ranks)


def _average_without_asking(run: Run) -> Iterator[Any]:
    averaged = AveragedModel(run.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for loss in plain_loop(run):
        averaged.update_parameters(run.model.module)
        yield loss, snapshot(averaged.state_dict())


def test_an_average_of_weights_is_right_without_synchronize_and_its_line_is_named(on_ranks) -> None:
    check_case(Case(_average_without_asking, model=DeepNet), on_ranks)
    [looks] = on_ranks(_looks, 1, Case(_average_without_asking, model=DeepNet))
    [(look, steps)] = looks.items()
    assert look.startswith(f"{Path(__file__).name}:") and "reads or writes parameters" in look
    assert steps > Case().steps // 2


def _looks(case: Case) -> dict[str, int]:
    run = Run(case, with_dear=True)
    for _ in case.loop(run):
        pass
    run.detach()
    return dict(run.state.stats().looks)


def _share_of_nan_before_and_after_synchronize(strict: bool) -> list[tuple[float, float]]:
    """As read through addresses, which torch does not tell of."""
    run = Run(Case(model=DeepNet, strict=strict), with_dear=True)
    memory = [(ctypes.c_float * p.numel()).from_address(p.data_ptr()) for p in run.model.module.parameters()]
    seen = []
    for _ in plain_loop(run):
        stale = sum(math.isnan(value) for each in memory for value in each) / sum(map(len, memory))
        run.synchronize()
        synced = sum(math.isnan(value) for each in memory for value in each) / sum(map(len, memory))
        seen.append((stale, synced))
    run.detach()
    return seen


def test_strict_shows_every_stale_read_and_nothing_else(on_ranks) -> None:
    [seen] = on_ranks(_share_of_nan_before_and_after_synchronize, 1, True)
    assert seen[-1] == (1.0, 0.0)
    [seen] = on_ranks(_share_of_nan_before_and_after_synchronize, 1, False)
    assert seen[-1] == (0.0, 0.0)


class SneakyNet(nn.Module):
    """One day reads the head's weight without calling the head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.head = nn.Linear(HIDDEN, HIDDEN)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x)
        if self.calls > LATE:
            return x[:, :OUTPUTS] + self.head.weight.sum()
        return self.head(x)[:, :OUTPUTS]


def test_a_read_that_no_earlier_forward_has_shown_is_right(on_ranks) -> None:
    check_case(Case(model=SneakyNet, ddp={"find_unused_parameters": True}), on_ranks)


def _leftover_gradients(run: Run) -> Iterator[Any]:
    run.attach()
    unused = run.model.module.never_used
    for p in unused.parameters():
        p.grad = torch.linspace(0.1, 0.9, p.numel()).reshape(p.shape)
    for x, y in run.batches():
        for module in (run.model.module.first, run.model.module.head):
            module.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        yield loss, [snapshot(p.grad) for p in unused.parameters()]


@pytest.mark.parametrize("view", [True, False])
def test_a_gradient_of_what_no_rank_uses_stays_what_it_is(on_ranks, view) -> None:
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    # On 3 ranks the mean of equal gradients is not the gradient: its last bits tell.
    case = Case(_leftover_gradients, model=HalfUsedNet, optimizer=SGD, ddp=ddp, world_size=3, pipelined=False)
    check_case(case, on_ranks)


class MixingSGD(torch.optim.Optimizer):
    """Takes a matrix product in its step, which autocast would do in bf16."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    flat = p.grad.reshape(1, -1)
                    mixed = flat @ torch.eye(flat.shape[1]).mul(1 / 3)
                    p.add_(mixed.reshape(p.shape), alpha=-group["lr"])
        return loss


def _made_mixing(model: nn.Module) -> torch.optim.Optimizer:
    return MixingSGD(model.parameters(), lr=0.1)


def _autocast(run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        run.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.loss(run.model(x).float(), y)
        loss.backward()
        run.optimizer.step()
        yield loss


def test_an_update_inside_of_autocast_is_computed_outside_of_it(on_ranks) -> None:
    check_case(Case(_autocast, model=DeepNet, optimizer=_made_mixing), on_ranks)


@pytest.mark.parametrize("schedule", ["auto", "dear", "allreduce"])
def test_every_schedule_is_exact(on_ranks, schedule) -> None:
    case = Case(model=DeepNet, world_size=3, dear={"schedule": schedule}, pipelined=schedule != "allreduce")
    check_case(case, on_ranks)
    check_case(replace(case, model=partial(DeepNet), world_size=2), on_ranks)
