"""Whoever follows the training of a process hears of every optimizer's steps, and leaves no hook behind."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as of_torch

from ddp_crossover.addons.launch.process_moments import ProcessMoments
from ddp_crossover.moments import Follower

pytestmark = pytest.mark.quick


class _Ends(Follower):
    def __init__(self, name: str, heard: list[str]) -> None:
        self.name = name
        self.heard = heard

    def step_ends(self, optimizer: Optimizer) -> None:
        self.heard.append(f"{self.name}: {optimizer.param_groups[0]['lr']}")


class _Both(_Ends):
    def step_begins(self, optimizer: Optimizer) -> None:
        self.heard.append(f"{self.name} begins")


def _hooks() -> tuple[int, int]:
    return len(of_torch._global_optimizer_pre_hooks), len(of_torch._global_optimizer_post_hooks)


def test_steps_of_all_optimizers_are_told_and_hooked_only_while_somebody_follows() -> None:
    heard: list[str] = []
    optimizers = [SGD([torch.zeros(1, requires_grad=True)], lr=lr) for lr in (1, 2)]
    moments, ends, both = ProcessMoments(), _Ends("ends", heard), _Both("both", heard)
    pre, post = _hooks()
    moments.follow(ends)
    assert _hooks() == (pre, post + 1)
    moments.follow(both)
    assert _hooks() == (pre + 1, post + 1)
    for optimizer in optimizers:
        optimizer.step()
    assert heard == ["both begins", "ends: 1", "both: 1", "both begins", "ends: 2", "both: 2"]
    moments.leave(both)
    assert _hooks() == (pre, post + 1)
    moments.leave(ends)
    moments.leave(ends)
    assert _hooks() == (pre, post)
