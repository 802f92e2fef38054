"""Whatever the plan, and whenever it changes, the parameters are those of plain DDP.

The other equivalence files cross loops with optimizers under the plan of small fixed groups. Here the loops meet other
plans: every schedule, plans drawn at random and changed in the middle of training, and those of the real tuner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import forward_loops
import gradient_loops
import loops
from ddp_crossover.fusion import Schedule
from equivalence import ADAMW, SGD, Case, Run, check_case, optimizer, plain_loop
from models import BatchNormNet, DeepNet, FrozenNet, WideNet
from optimizers import grouped, interleaved_optimizers
from plans import judged_plans, random_plans
from random_loops import random_loop
from wirings import SkippingNet, TiedNet

Loop = Callable[[Run], Iterator[Any]]

BUCKET_VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}

# Those whose state between two steps a change of plan could disturb.
FEATURES = {
    "allreduce": Case(model=DeepNet),
    "bucket_view": Case(model=DeepNet, ddp=BUCKET_VIEWS),
    "zero_grad_keeping_memory": Case(loops.zero_grad_keeping_memory, ddp=BUCKET_VIEWS),
    "zero_grad_after_step": Case(loops.zero_grad_in_place_after_step, ddp=BUCKET_VIEWS),
    "never_zero_grad": Case(loops.never_zero_grad),
    "accumulation": Case(loops.accumulate_with_no_sync, model=DeepNet),
    "accumulation_bucket_view": Case(loops.accumulate_without_no_sync, ddp=BUCKET_VIEWS),
    "sometimes_no_step": Case(loops.sometimes_no_step, model=DeepNet),
    "stock_clipping": Case(gradient_loops.clip_norm, model=DeepNet),
    "own_clipping": Case(gradient_loops.clip_norm_on_shards_inactive, model=DeepNet),
    "hold_on_to_gradients": Case(gradient_loops.hold_on_to_gradients, model=DeepNet),
    "scheduler": Case(loops.scheduler_made_after_attach, model=DeepNet, optimizer=grouped),
    "several_forwards": Case(forward_loops.several_forwards_per_step),
    "evaluation": Case(forward_loops.evaluate_between_steps, model=BatchNormNet),
    "state_dicts": Case(forward_loops.state_dict_after_every_step, model=DeepNet),
    "find_unused": Case(model=SkippingNet, ddp=UNUSED),
    "find_unused_bucket_view": Case(model=SkippingNet, ddp={**UNUSED, **BUCKET_VIEWS}),
    "tied": Case(model=TiedNet),
    "frozen": Case(model=FrozenNet),
    "two_optimizers": Case(loops.every_optimizer_steps, model=DeepNet, optimizer=interleaved_optimizers),
    "own_scaler": Case(partial(gradient_loops.scaler, own=True), model=DeepNet),
    "stock_scaler": Case(gradient_loops.scaler, model=DeepNet),
    "wire_dtype": Case(model=DeepNet, dear={"wire_dtype": torch.bfloat16}),
}
OPTIMIZERS = [ADAMW, SGD, optimizer(torch.optim.AdamW, lr=0.01, fused=True), optimizer(torch.optim.Rprop, lr=0.01)]
SLOW_SGD = optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
CHOOSE_THEIR_OPTIMIZER = {"scheduler", "two_optimizers"}


# "auto" is what every other file runs.
@pytest.mark.parametrize(
    ("name", "schedule"),
    [*((name, "dear") for name in FEATURES), *((name, "allreduce") for name in list(FEATURES)[::2])],
)
def test_every_schedule_is_exact(on_ranks, name, schedule) -> None:
    case = FEATURES[name]
    check_case(replace(case, dear={**case.dear, "schedule": schedule}, pipelined=False), on_ranks)


def _under_random_plans(run: Run, loop: Loop, seed: int) -> Iterator[Any]:
    with random_plans(seed):
        yield from loop(run)
    if run.with_dear:
        choices = run.state._planning.choices
        assert len({choice.digest() for choice in choices}) > 2, "this seed hardly changes plans"


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # each example takes a second: the first that fails is good enough
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**20),
    name=st.sampled_from(sorted(FEATURES)),
    world_size=st.integers(1, 4),
    chosen=st.sampled_from(OPTIMIZERS),
    strict=st.booleans(),
)
def test_plans_that_change_in_the_middle_are_exact(on_ranks, seed, name, world_size, chosen, strict) -> None:
    case = FEATURES[name]
    if name not in CHOOSE_THEIR_OPTIMIZER:
        case = replace(case, optimizer=chosen)
    case = replace(
        case,
        loop=partial(_under_random_plans, loop=case.loop, seed=seed),
        world_size=world_size,
        strict=strict,
        steps=20,
        pipelined=False,
    )
    check_case(case, on_ranks)


@pytest.mark.parametrize("seed", range(4))
def test_random_loops_under_random_plans_are_exact(on_ranks, seed) -> None:
    loop = partial(_under_random_plans, loop=partial(random_loop, seed=seed), seed=seed)
    ddp = BUCKET_VIEWS if seed % 2 else {}
    check_case(Case(loop, DeepNet, world_size=2 + seed % 2, steps=14, ddp=ddp, pipelined=False), on_ranks)


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
