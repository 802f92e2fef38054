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
from own_optimizers import OwnOptimizer
from wirings import CheckpointNet


def check(case: Case, on_ranks, at_least: int = 0) -> None:
    loop = partial(eagerly, loop=case.loop, seed=4, at_least=at_least)
    check_case(replace(case, loop=loop, dear={"shard_optimizer": True, **case.dear}, pipelined=False), on_ranks)


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
    for index, loss in enumerate(gradient_loops._backward(run)):
        if index % 3:
            for p in run.model.parameters():
                p.data.mul_(0.99)
        run.optimizer.step()
        yield loss


def decay_through_aliases(run: Run) -> Iterator[Any]:
    """The same through tensors that were made long before."""
    aliases = [p.data for p in run.model.parameters()]
    for loss in gradient_loops._backward(run):
        for alias in aliases:
            alias.mul_(0.99)
        run.optimizer.step()
        yield loss


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_what_changes_before_the_step_drops_them(on_ranks, optimizer) -> None:
    check(Case(decay_parameters_before_step, optimizer=optimizer, model=DeepNet), on_ranks)


class Counting(OwnOptimizer):
    """Keeps a counter in its param groups, as schedule-free optimizers do."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        group["steps"] = group["steps"] + 1
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] / group["steps"])


@pytest.mark.parametrize("eager", [False, True])
def test_counters_in_param_groups(on_ranks, eager: bool) -> None:
    case = Case(optimizer=optimizer(Counting, steps=0), world_size=2, pipelined=False)
    if eager:
        check(case, on_ranks)
    else:  # then the rest of a step is tried, without a group that was tried in backward
        check_case(replace(case, dear={"shard_optimizer": True, "fusion_mb": 10.0}), on_ranks)


def test_parameters_with_aliases_are_not_tried(on_ranks) -> None:
    check(Case(decay_through_aliases), on_ranks)


@pytest.mark.parametrize("loop", [plain_loop, loops.sometimes_no_step, gradient_loops.log_one_gradient_sometimes])
def test_16_bit_wire(on_ranks, loop) -> None:
    check(Case(loop, dear={"wire_dtype": torch.bfloat16}), on_ranks)
