"""The tuner changes to plain all-reduces in the middle of anything, and nobody loses by it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import loops
from equivalence import SGD, Case, Run, check_case, optimizer, plain_loop
from models import INPUTS, OUTPUTS
from plans import plain_after

AFTER_STEPS = 4
STEPS = 12


class ReplacingSgd(torch.optim.Optimizer):
    """Momentum SGD that makes a new entry of state in each step, instead of changing the old one."""

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
                    momentum = self.state[p].get("momentum", torch.zeros_like(p)) * 0.9 + p.grad
                    self.state[p] = {"momentum": momentum}
                    p.sub_(group["lr"] * momentum)
        return loss


def _turning_plain(run: Run, loop: Any) -> Iterator[Any]:
    with plain_after(AFTER_STEPS):
        yield from loop(run)
    if run.with_dear:
        assert run.state.plan is None


@pytest.mark.parametrize(
    ("loop", "make"),
    [
        (plain_loop, optimizer(ReplacingSgd, lr=0.05)),
        (loops.backward_inside_closure, optimizer(torch.optim.Adam, lr=0.01)),
        (loops.zero_grad_keeping_memory, SGD),
    ],
)
def test_the_optimizer_keeps_its_state(on_ranks, loop, make) -> None:
    check_case(Case(partial(_turning_plain, loop=loop), optimizer=make, steps=STEPS, pipelined=False), on_ranks)


def _gradients_after_detach() -> set[type]:
    run = Run(Case(loops.zero_grad_keeping_memory, optimizer=SGD, steps=STEPS), with_dear=True)
    for _ in _turning_plain(run, run.case.loop):
        pass
    run.detach()
    return {type(p.grad) for p in run.model.parameters() if p.grad is not None}


def test_detach_leaves_plain_gradients(on_ranks) -> None:
    for kinds in on_ranks(_gradients_after_detach, 2):
        assert kinds == {torch.Tensor}


class _WithoutInit(torch.optim.Optimizer):
    """Neither hooks nor state."""

    def __init__(self, params: Any, lr: float) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.defaults = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(self.param_groups[0]["lr"] * p.grad)


def _steps_without_init() -> int:
    run = Run(Case(optimizer=optimizer(_WithoutInit, lr=0.05), steps=STEPS), with_dear=True)
    steps = sum(1 for _ in _turning_plain(run, plain_loop))
    run.detach()
    return steps


def test_an_optimizer_without_state_trains_on(on_ranks) -> None:
    assert on_ranks(_steps_without_init, 2) == [STEPS] * 2


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


class _ScriptedNet(nn.Module):
    """Once hands its first weight to code that no override sees. Larger than one of DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 600, bias=False)
        self.middle = nn.Linear(600, 600, bias=False)
        self.last = nn.Linear(600, OUTPUTS, bias=False)
        self.is_scripted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.jit.script(_linear)(x, self.first.weight) if self.is_scripted else self.first(x)
        return self.last(self.middle(first))


def _outcome_of_an_unseen_read_as_it_turns(turns_at: int) -> str:
    # With strict=True nothing is covered.
    run = Run(Case(model=_ScriptedNet, optimizer=SGD, steps=STEPS, strict=True), with_dear=True)
    try:
        with plain_after(AFTER_STEPS):
            for index, (x, y) in enumerate(run.batches()):
                run.model.module.is_scripted = index == turns_at
                run.optimizer.zero_grad()
                run.loss(run.model(x), y).backward()
                assert index < turns_at or run.state.plan is None
                run.optimizer.step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.detach()
    return "nothing was noticed"


def test_a_read_that_nobody_saw_is_an_error_in_that_step_too(on_ranks) -> None:
    turns_at = 3 + AFTER_STEPS
    for outcome in on_ranks(_outcome_of_an_unseen_read_as_it_turns, 1, turns_at):
        assert outcome.startswith("StaleParameterError") and "first.weight" in outcome
