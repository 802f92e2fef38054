"""DDP as it was before attach: the tuner tries it, keeps it where nothing is gained, and then nothing of us is left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import gradient_loops
import loops
from ddp_crossover.comm.gloo_link import GlooLink
from ddp_crossover.fusion import Schedule
from ddp_crossover.plan import session
from ddp_crossover.plan.cost_model import LinkModel
from ddp_crossover.torch_internals.ddp import has_comm_hook
from equivalence import ADAMW, SGD, Case, Run, check_case, plain_loop
from models import INPUTS, OUTPUTS, WideNet
from plans import AS_BUILT, judged_plans

BUCKET_VIEWS = {"gradient_as_bucket_view": True}
SEARCHED = {"fusion_mb": None}


def _assert_left_alone(
    run: Run, earlier: Collection[threading.Thread], how: str = "DDP trains as it was before attach"
) -> None:
    """Nothing is hooked into the model, and nothing runs beside it."""
    assert run.state.detached and run.state.plan is None and not run.state.tuning
    assert how in run.state.tuning_progress()
    assert "forward" not in vars(run.model) and not has_comm_hook(run.model)
    assert type(run.model.module.state_dict()) is not None
    assert all(type(parameter) is nn.Parameter for parameter in run.model.parameters())
    assert not run.optimizer._optimizer_step_pre_hooks and not run.optimizer._optimizer_step_post_hooks
    # Earlier tests of these ranks may have left some to the garbage collector.
    left = [thread.name for thread in threading.enumerate() if thread not in earlier]
    assert not any(name.startswith("ddp_crossover") for name in left), f"threads run on: {left}"


def _tuned(run: Run, loop: Any, is_left_alone: bool) -> Iterator[Any]:
    cap_bytes, earlier = run.model.bucket_bytes_cap, threading.enumerate()
    with judged_plans(AS_BUILT):
        yield from loop(run)
    if run.with_dear:
        result = run.state._planning.result
        assert str(result.best) == "DDP as it was"
        kinds = [trial.candidate.as_built for trial in result.trials]
        assert sum(one != other for one, other in itertools.pairwise(kinds)) >= 2, "the buckets did not change back"
        assert run.model.bucket_bytes_cap == cap_bytes
        if is_left_alone:
            _assert_left_alone(run, earlier)
        else:
            assert not run.state.detached and run.state._reducer._in_force.buckets.are_as_built
            assert run.state._reducer._in_force._memory == {}, "arenas were kept"


@pytest.mark.parametrize(
    ("loop", "world_size", "ddp"),
    [
        pytest.param(plain_loop, 2, {}, marks=pytest.mark.quick),
        (plain_loop, 2, {"find_unused_parameters": True}),
        (plain_loop, 2, {"static_graph": True}),
        pytest.param(plain_loop, 2, {"bucket_cap_mb": 0.001}, marks=pytest.mark.nightly),
        (plain_loop, 3, {}),
        (loops.accumulate_with_no_sync, 2, BUCKET_VIEWS),
        (loops.accumulate_once_the_graph_is_known, 2, {"static_graph": True} | BUCKET_VIEWS),
        (loops.zero_grad_keeping_memory, 2, BUCKET_VIEWS),
        (gradient_loops.clip_norm, 2, {}),
    ],
)
def test_ddp_as_it_was_is_tried_and_kept_without_a_difference(on_ranks, loop, world_size, ddp) -> None:
    """From the first step to the last: observed, in the pipeline, with two kinds of buckets, and left alone."""
    loop = partial(_tuned, loop=loop, is_left_alone=world_size <= 2)
    case = Case(loop, WideNet, SGD, world_size, steps=110, dear=SEARCHED, ddp=ddp, strict=False, pipelined=False)
    check_case(case, on_ranks)


def _tuned_to_small_buckets(run: Run, is_left_alone: bool) -> Iterator[Any]:
    cap_bytes, earlier = run.model.bucket_bytes_cap, threading.enumerate()
    with judged_plans(Schedule.ALLREDUCE):
        yield from plain_loop(run)
    if run.with_dear:
        assert str(run.state._planning.result.best) == "plain all-reduces"
        assert run.model.bucket_bytes_cap == cap_bytes
        if is_left_alone:
            _assert_left_alone(run, earlier, "DDP trains by itself, in buckets of ")
            assert _arrivals_in_buckets(run) > 1, "DDP has its large buckets back"
        else:
            assert not run.state.detached and not run.state._reducer._in_force.buckets.are_as_built


def _arrivals_in_buckets(run: Run) -> int:
    """The number of buckets of a backward, which leaves no trace in gradients."""
    buckets: list[int] = []

    def hook(state, bucket):  # DDP checks annotations, and finds strings in this file
        buckets.append(bucket.index())
        return noop_hook(state, bucket)

    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in run.model.parameters()]
    run.model.register_comm_hook(None, hook)
    run.model(torch.ones(2, INPUTS)).sum().backward()
    for parameter, gradient in gradients:
        parameter.grad = gradient
    return len(buckets)


@pytest.mark.parametrize(
    ("world_size", "ddp"),
    [
        pytest.param(2, {}, marks=pytest.mark.quick),
        (2, {"find_unused_parameters": True}),
        (2, {"static_graph": True}),
        (3, {}),
    ],
)
def test_small_buckets_that_win_stay_and_nothing_else(on_ranks, world_size, ddp) -> None:
    loop = partial(_tuned_to_small_buckets, is_left_alone=world_size <= 2)
    case = Case(loop, WideNet, SGD, world_size, steps=110, dear=SEARCHED, ddp=ddp, strict=False, pipelined=False)
    check_case(case, on_ranks)


def _only_one(run: Run) -> Iterator[Any]:
    earlier = threading.enumerate()
    for index, loss in enumerate(plain_loop(run)):
        if run.with_dear and index == 0:
            _assert_left_alone(run, earlier)
            assert "there is one rank" in run.state.tuning_progress()
            assert any("there is one rank" in reason for reason in run.state.stats().fallbacks)
        yield loss


@pytest.mark.quick
def test_one_rank_is_left_alone_at_its_first_forward(on_ranks) -> None:
    check_case(Case(_only_one, world_size=1, dear=SEARCHED, strict=False, pipelined=False), on_ranks)


@pytest.mark.parametrize("dear", [{"fusion_mb": 0.1}, {"schedule": "dear"}], ids=str)
def test_one_rank_takes_the_pipeline_if_it_is_told_to(on_ranks, dear) -> None:
    check_case(Case(world_size=1, dear=SEARCHED | dear, strict=False), on_ranks)


def _with_file(path: str) -> tuple[int, bool]:
    """Steps until DDP is left alone, and whether that was tuned."""
    run = Run(Case(optimizer=ADAMW, steps=110, dear=SEARCHED | {"tuned_file": path}, strict=False), with_dear=True)
    with judged_plans(AS_BUILT):
        run.attach()
    steps = 0
    for _ in plain_loop(run):
        steps += not run.state.detached
    return steps, run.state._planning.result is not None


def test_what_was_stored_as_not_worth_it_is_left_alone_from_the_start(on_ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "tuned.json")
    for steps, was_tuned in on_ranks(_with_file, 2, path):
        assert steps > 20 and was_tuned
    assert on_ranks(_with_file, 2, path) == [(0, False), (0, False)]


def _attach_again() -> list[bool]:
    run = Run(Case(world_size=1, dear=SEARCHED, strict=False), with_dear=True)
    list(plain_loop(run))
    left = run.state
    run.case = Case(world_size=1, strict=False)
    run.attach()
    list(plain_loop(run))
    return [left.detached, run.state.detached, run.state.stats().pipelined_iterations > 0]


def test_a_model_that_was_left_alone_can_be_attached_to_again(on_ranks) -> None:
    assert on_ranks(_attach_again, 1) == [[True, False, True]]


class Wide(nn.Module):
    """20 MB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


# As on a link that wants fusion buffers in one piece, so that gradients are copied into arenas.
@mock.patch.object(GlooLink, "takes_parts", False)
def _memory_given_back() -> tuple[int, int]:
    """Bytes of arenas before and after."""
    import ddp_crossover as dx

    model = DistributedDataParallel(Wide())
    with judged_plans(AS_BUILT):
        state = dx.attach(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    before = sum(arena.untyped_storage().nbytes() for arena in state._reducer._in_force._memory.values())
    optimizer = state.optimizers[0]
    for _ in range(110):
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
    assert state.detached
    return before, sum(arena.untyped_storage().nbytes() for arena in state._reducer._in_force._memory.values())


def test_memory_is_given_back(on_ranks) -> None:
    for before, after in on_ranks(_memory_given_back, 2):
        assert before > 20e6 and after == 0


class Turning(nn.Module):
    """Uses its layers in another order from a certain step on, so that DDP orders new buckets in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.last = nn.Linear(INPUTS, 400), nn.Linear(400, OUTPUTS)
        self.first, self.second = nn.Linear(400, 400), nn.Linear(400, 400)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        one, other = (self.first, self.second) if self.steps < 16 else (self.second, self.first)
        return self.last(other(torch.tanh(one(self.start(x)))))


def _begins(run: Run) -> Iterator[Any]:
    begin = session.Planning.begin
    with mock.patch.object(session.Planning, "begin", autospec=True, side_effect=begin) as begins:
        yield from _tuned(run, plain_loop, is_left_alone=True)
    assert begins.call_count == run.with_dear, "the tuner has started anew"


def test_gradients_that_come_in_another_order_in_new_buckets_do_not_start_the_tuner_anew(on_ranks) -> None:
    case = Case(_begins, Turning, ADAMW, steps=110, dear=SEARCHED, strict=False, pipelined=False)
    check_case(case, on_ranks)


def _over_a_fast_link() -> tuple[bool, bool, str]:
    """A link that takes no time, whatever the real one does."""
    run = Run(Case(steps=30, dear=SEARCHED, strict=False), with_dear=True)
    with mock.patch.object(session, "probe_link", lambda *_: LinkModel(1e-9, 1e-9, 1e-15)):
        run.attach()
    list(plain_loop(run))
    return run.state.detached, run.state._planning.result is None, run.state.tuning_progress()


def test_a_link_faster_than_compute_by_far_is_not_tuned(on_ranks) -> None:
    for detached, untuned, progress in on_ranks(_over_a_fast_link, 2):
        assert detached and untuned and "under 1% of a step exposed" in progress
