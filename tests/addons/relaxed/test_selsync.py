"""Ranks that share when gradients change: what must hold exactly."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_relaxed_training import STEPS, _check, _train, _train_plain, relaxed
from torch import nn

import ddp_crossover as dx
from ddp_crossover.relaxed import SelSync
from relaxed_reference import adam, flat, net, samples, sgd, step_of

NO_LIMIT = 10**9


@pytest.mark.parametrize(
    ("world_size", "policy"),
    [
        (2, SelSync(threshold=0.15, window=3, every=4)),
        (3, SelSync(threshold=0.2, window=2, delay=2)),
        (2, SelSync(threshold=0.5, window=2, delay=3)),
    ],
    ids=str,
)
def test_it_is_what_the_formulas_say(on_ranks, world_size, policy) -> None:
    _check(on_ranks, world_size, policy, adam)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_threshold_of_0_is_plain_ddp_for_sgd(on_ranks, world_size) -> None:
    policy = SelSync(threshold=0.0, window=2, every=NO_LIMIT)
    plain = on_ranks(_train_plain, world_size)
    for ours, means in on_ranks(_train, world_size, policy, sgd):
        torch.testing.assert_close(ours, plain[0], rtol=1e-12, atol=1e-12)
        assert means == STEPS


def _alone_after_the_window(policy: SelSync) -> tuple[bool, int]:
    with relaxed(policy, adam) as one:
        one.train(4)
        one.parameters()  # merges the fourth mean
        alone = net()
        alone.load_state_dict(one.ddp.module.state_dict())
        optimizer = adam(alone.parameters())
        optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        one.train(6)
        for step in range(4, 10):
            step_of(alone, optimizer, step, one.rank)
        return torch.equal(one.parameters(), flat(alone)), one.state.stats().means


def test_without_a_threshold_each_rank_is_a_lone_run_after_the_first_window(on_ranks) -> None:
    policy = SelSync(threshold=math.inf, window=4, every=NO_LIMIT)
    assert on_ranks(_alone_after_the_window, 2, policy) == [(True, 4)] * 2


def _decisions(change_at: int | None, scale: float, scaler: Any, factor: float = 30.0) -> list[int]:
    """The steps after which this rank has shared; rank 1's loss is larger in one step."""
    policy = SelSync(threshold=5.0, window=3, every=NO_LIMIT)
    seen = []
    with relaxed(policy, sgd, torch.float32) as one:
        for step in range(12):
            x, y = samples(step, one.rank, torch.float32)
            one.optimizer.zero_grad()
            loss = nn.functional.mse_loss(one.ddp(x), y) * scale
            if step == change_at and one.rank == 1:
                loss = loss * factor
            (loss if scaler is None else scaler.scale(loss)).backward()
            for parameter in one.ddp.parameters():
                parameter.grad.div_(scale)
            if scaler is None:
                one.optimizer.step()
            else:
                scaler.step(one.optimizer)
                scaler.update()
            before = one.state.stats().means
            one.parameters()
            if one.state.stats().means > before:
                seen.append(step + 1)
    return seen


def test_all_ranks_share_one_step_after_gradients_have_changed_on_one(on_ranks) -> None:
    assert on_ranks(_decisions, 2, None, 1.0, None) == [[1, 2, 3]] * 2
    assert on_ranks(_decisions, 2, 7, 1.0, None) == [[1, 2, 3, 9]] * 2  # the step numbered 8 has changed


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_the_scale_of_gradients_does_not_matter(on_ranks, scale) -> None:
    assert on_ranks(_decisions, 2, 7, scale, None) == [[1, 2, 3, 9]] * 2


def _decisions_with_a_scaler(factor: float) -> list[int]:
    return _decisions(7, 1.0, dx.GradScaler("cpu", init_scale=8.0, growth_interval=2), factor)


@pytest.mark.parametrize("factor", [math.inf, 30.0], ids=["overflow", "growing scale"])
def test_a_loss_scale_is_no_change_of_gradients_and_an_overflow_is_not_remembered(on_ranks, factor) -> None:
    assert on_ranks(_decisions_with_a_scaler, 2, factor) == [[1, 2, 3, 9]] * 2


def _resumed() -> tuple[bool, int]:
    """A run that is stopped after each step and goes on from what it has saved."""
    policy = SelSync(threshold=0.1, window=2)
    with relaxed(policy, adam) as one:
        one.train(9)
        expected, means = one.parameters(), one.state.stats().means
    saved: Any = None
    for step in range(9):
        with relaxed(policy, adam) as one:
            if saved is not None:
                model, optimizer, state = saved
                one.ddp.module.load_state_dict(model)
                one.optimizer.load_state_dict(optimizer)
                one.state.load_state_dict(state)
            x, y = samples(step, dist.get_rank())
            one.optimizer.zero_grad()
            nn.functional.mse_loss(one.ddp(x), y).backward()
            one.optimizer.step()
            saved = copy.deepcopy((one.ddp.module.state_dict(), one.optimizer.state_dict(), one.state.state_dict()))
            last = one.parameters()
    return torch.equal(last, expected), means


def test_a_run_goes_on_with_the_same_bits(on_ranks) -> None:
    for is_same, means in on_ranks(_resumed, 2):
        assert is_same and means > 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"threshold": -1.0}, "threshold"),
        ({"threshold": math.nan}, "threshold"),
        ({"threshold": 1, "window": 0}, "window"),
        ({"threshold": 1, "every": 0}, "every"),
    ],
)
def test_wrong_numbers_are_refused(arguments, named) -> None:
    with pytest.raises(ValueError, match=named):
        SelSync(**arguments)
