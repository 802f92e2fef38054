"""Updates that are tried in backward count if the step is what they took it for; if not, they leave no trace.

Most of what they meet the fuzzer draws (`eager`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import gradient_loops
import loops
from eager_updates import eagerly
from equivalence import ADAMW, SGD, Case, Run, check_case, optimizer, plain_loop
from models import DeepNet, MatrixNet
from optimizers import MUON, OPTIMIZERS
from wirings import CheckpointNet


def check(case: Case, on_ranks, at_least: int = 0, of_them_taken: bool = True) -> None:
    loop = partial(eagerly, loop=case.loop, seed=len(case.model.__class__.__name__), at_least=at_least)
    case = Case(
        partial(loop, of_them_taken=of_them_taken),
        case.model,
        case.optimizer,
        case.world_size,
        case.steps,
        case.ddp,
        {"shard_optimizer": True, **case.dear},
        case.strict,
        pipelined=False,
    )
    check_case(case, on_ranks)


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adamw_fused"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_they_are_taken_in_plain_training(on_ranks, name: str, world_size: int) -> None:
    views = {"gradient_as_bucket_view": world_size == 3}
    check(Case(optimizer=OPTIMIZERS[name], world_size=world_size, ddp=views), on_ranks, at_least=4)


def test_whole_matrices(on_ranks) -> None:
    check(Case(model=MatrixNet, optimizer=MUON, world_size=3), on_ranks, at_least=4)


def test_in_a_model_that_checkpoints(on_ranks) -> None:
    check(Case(model=CheckpointNet), on_ranks)


def decay_parameters_before_step(run: Run) -> Iterator[Any]:
    """Writes past the parameter objects, as old scripts do for weight decay."""
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        if index % 3:
            for p in run.model.parameters():
                p.data.mul_(0.99)
        run.optimizer.step()
        yield loss


def decay_through_aliases(run: Run) -> Iterator[Any]:
    """The same through tensors that were made long before."""
    aliases = [p.data for p in run.model.parameters()]
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        for alias in aliases:
            alias.mul_(0.99)
        run.optimizer.step()
        yield loss


def new_rate_before_step(run: Run) -> Iterator[Any]:
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        run.optimizer.param_groups[0]["lr"] = 0.01 / (1 + index)
        run.optimizer.step()
        yield loss


def one_rank_writes_nothing_but_reads(run: Run) -> Iterator[Any]:
    """Rank 0 looks at a parameter between backward and step, the others do not."""
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        if run.rank == 0:
            next(run.model.parameters()).norm()
        run.optimizer.step()
        yield loss


@pytest.mark.parametrize(
    "loop",
    [decay_parameters_before_step, new_rate_before_step, one_rank_writes_nothing_but_reads],
    ids=lambda loop: loop.__name__,
)
@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_what_changes_before_the_step_drops_them(on_ranks, loop, optimizer) -> None:
    check(Case(loop, optimizer=optimizer, model=DeepNet), on_ranks)


class Counting(torch.optim.Optimizer):
    """Keeps a counter in its param groups, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["steps"] = group["steps"] + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["steps"])
        return loss


@pytest.mark.parametrize("eager", [False, True])
def test_counters_in_param_groups(on_ranks, eager: bool) -> None:
    case = Case(optimizer=optimizer(Counting), world_size=2, pipelined=False)
    if eager:
        check(case, on_ranks)
    else:  # then the rest of a step is tried, without a group that was tried in backward
        check_case(replace(case, dear={"shard_optimizer": True, "fusion_mb": 10.0}), on_ranks)


def test_parameters_with_aliases_are_not_tried(on_ranks) -> None:
    check(Case(decay_through_aliases), on_ranks)


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16])
@pytest.mark.parametrize("loop", [plain_loop, loops.sometimes_no_step, gradient_loops.log_one_gradient_sometimes])
def test_16_bit_wire(on_ranks, loop, wire_dtype: torch.dtype) -> None:
    check(Case(loop, dear={"wire_dtype": wire_dtype}), on_ranks)
