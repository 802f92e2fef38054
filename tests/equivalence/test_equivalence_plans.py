"""Tuned from its beginning to its end, training has the bits of plain DDP.

The fuzzer draws all schedules, and plans that are drawn at random and change in the middle of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import gradient_loops
import loops
from ddp_crossover.fusion import Schedule
from equivalence import Case, Run, check_case, optimizer, plain_loop
from models import WideNet
from plans import judged_plans

Loop = Callable[[Run], Iterator[Any]]

BUCKET_VIEWS = {"gradient_as_bucket_view": True}
SLOW_SGD = optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)


def _tuned(run: Run, loop: Loop, favourite: str) -> Iterator[Any]:
    with judged_plans(favourite):
        yield from loop(run)
    if run.with_dear:
        choices = run.state._planning.choices
        assert not run.state.tuning
        assert run.state._planning.result.best.schedule == favourite
        assert (
            (choices[-1].schedule is Schedule.ALLREDUCE)
            == (favourite == Schedule.ALLREDUCE)
            == (run.state.plan is None)
        )
        assert {choice.schedule is Schedule.ALLREDUCE for choice in choices} == {True, False}
        assert len({choice.fusion_mb for choice in choices}) > 3


@pytest.mark.parametrize(
    ("loop", "world_size", "favourite"),
    [
        (plain_loop, 1, Schedule.AUTO),
        (plain_loop, 2, Schedule.AUTO),
        (plain_loop, 3, Schedule.ALLREDUCE),
        (loops.zero_grad_keeping_memory, 2, Schedule.ALLREDUCE),
        (gradient_loops.clip_norm_on_shards_inactive, 2, Schedule.AUTO),
    ],
)
def test_tuning_from_its_beginning_to_its_end_is_exact(on_ranks, loop, world_size, favourite) -> None:
    """On 60 steps at most, of which some run as plain all-reduce; then some under what was found."""
    loop = partial(_tuned, loop=loop, favourite=favourite)
    dear = {"fusion_mb": None}
    case = Case(loop, WideNet, SLOW_SGD, world_size, steps=80, dear=dear, ddp=BUCKET_VIEWS, pipelined=False)
    check_case(case, on_ranks)
