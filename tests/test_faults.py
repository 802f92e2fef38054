"""When something breaks: an error that says what, soon, and never a hang or a model trained on
garbage.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp_crossover.comm.gloo_leg import GlooScatterLeg
from ddp_crossover.comm.gloo_link import GlooLink
from equivalence import SGD, Case, Run, check_case, snapshot
from failing_backward import FailingBackward
from harness import assert_lost_peer_is_named, run_faulty_ranks
from models import DeepNet

pytestmark = pytest.mark.launches

GROUP_TIMEOUT_S = 4.0
# From the peer's end, or from the group's timeout, until this process has left.
GRACE_S = 12.0
FAULT_AT = 8


def _train(at_fault: Callable[[], None], where: str) -> str:
    """Train; the last rank calls `at_fault` in "forward", "backward" or after "step" of one
    iteration.
    """
    run = Run(Case(model=DeepNet, steps=FAULT_AT + 20), with_dear=True)
    run.attach()
    armed = False

    def trip(*_: Any) -> None:
        if armed:
            at_fault()

    middle = run.model.module[6]
    if where == "forward":
        middle.register_forward_hook(trip)
    elif where == "backward":
        middle.weight.register_hook(trip)
    for index, (x, y) in enumerate(run.batches()):
        armed = index == FAULT_AT and run.rank == dist.get_world_size() - 1
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        run.optimizer.step()
        if where == "step":
            trip()
    return "trained to the end"


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _leave_training() -> None:
    """As a rank that has run out of data: alive, but it takes part no more."""
    time.sleep(GROUP_TIMEOUT_S + 3)
    os._exit(0)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank_ends_the_others_with_an_error_that_names_it(world_size, where) -> None:
    outcomes = run_faulty_ranks(_train, world_size, _kill_self, where, group_timeout_s=GROUP_TIMEOUT_S)
    assert outcomes[-1].exitcode == -signal.SIGKILL
    assert_lost_peer_is_named(outcomes[:-1], within_s=GROUP_TIMEOUT_S + GRACE_S)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_stopped_rank_ends_the_others_within_the_timeout(where) -> None:
    outcomes = run_faulty_ranks(
        _train,
        2,
        _stop_self,
        where,
        group_timeout_s=GROUP_TIMEOUT_S,
        stops=frozenset({1}),
    )
    assert_lost_peer_is_named(outcomes[:-1], within_s=GROUP_TIMEOUT_S + GRACE_S)


def test_a_rank_that_stops_training_ends_the_others_within_the_timeout() -> None:
    outcomes = run_faulty_ranks(_train, 2, _leave_training, "step", group_timeout_s=GROUP_TIMEOUT_S)
    assert_lost_peer_is_named(outcomes[:-1], within_s=GROUP_TIMEOUT_S + GRACE_S)


def _wait_for_a_stopped_peer_and_get_interrupted() -> str:
    if dist.get_rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background inherit that it is ignored
        interrupt = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.daemon = True
        interrupt.start()
    return _train(_stop_self, "backward")


def test_ctrl_c_ends_a_rank_that_waits_for_a_stopped_peer() -> None:
    outcomes = run_faulty_ranks(
        _wait_for_a_stopped_peer_and_get_interrupted,
        2,
        group_timeout_s=60,
        timeout_s=40,
        stops=frozenset({1}),
    )
    assert outcomes[0].error is not None
    assert outcomes[0].error.strip().endswith("KeyboardInterrupt")
    assert outcomes[0].seconds < 3 + GRACE_S


def _train_through_an_exception(with_dear: bool, layer: int, fails: bool, dear: dict[str, Any]) -> dict[str, Any]:
    """Backward raises at one iteration, whose step is left out; `fails=False` leaves it out anyway."""
    # Buckets as small as this let legs of both kinds be under way when it raises.
    run = Run(Case(model=DeepNet, optimizer=SGD, ddp={"bucket_cap_mb": 1e-4}, dear=dear), with_dear)
    run.attach()
    run.model.module[layer].register_forward_hook(lambda module, inputs, output: FailingBackward.apply(output))
    refused = None
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        if index != FAULT_AT:
            try:
                run.loss(run.model(x), y).backward()
            except RuntimeError as error:
                refused = str(error)
                break
            run.optimizer.step()
        elif fails:
            FailingBackward.error = ZeroDivisionError("the user's own")
            with pytest.raises(ZeroDivisionError):
                run.loss(run.model(x), y).backward()
    run.optimizer.zero_grad()
    state = snapshot(run.model.module.state_dict())
    if run.state is not None:
        run.state.detach()
    return {"refused": refused, "state": state, "steps": index}


# The layer decides how many of the gradients are under way when backward fails.
@pytest.mark.parametrize("layer", [0, 6, 14], ids=["last_gradient", "middle", "first_gradient"])
# The default schedule sends gather legs in backward; without a group size it measures times just then.
@pytest.mark.parametrize("dear", [{}, {"fusion_mb": None}, {"schedule": "dear"}], ids=["auto", "profiling", "dear"])
def test_after_an_exception_in_backward_nothing_trains_on_garbage(on_ranks, layer, dear) -> None:
    expected = on_ranks(_train_through_an_exception, 2, False, layer, False, dear)[0]
    for seen in on_ranks(_train_through_an_exception, 2, True, layer, True, dear):
        if seen["refused"] is None:
            for name, value in expected["state"].items():
                assert torch.equal(seen["state"][name], value), name
        else:
            # Plain DDP refuses to go on as well. What counts is that the parameters were left
            # alone.
            assert seen["steps"] == FAULT_AT + 1
            before = on_ranks(_parameters_before_the_fault, 2)[0]
            for name, value in before.items():
                assert torch.equal(seen["state"][name], value), name


def _legs_of_a_broken_backward(goes_on: bool) -> None:
    """What was announced to peers before backward raised is over when the next one begins, or after detach."""
    legs: list[GlooScatterLeg] = []
    announce = GlooLink.announce

    def noting(link: GlooLink, group: int, buffer: torch.Tensor) -> None:
        announce(link, group, buffer)
        legs.append(link.early_receives.legs[group])

    # One bucket per layer, one group per gradient: when it raises, some are announced and not on their way.
    run = Run(Case(model=DeepNet, optimizer=SGD, ddp={"bucket_cap_mb": 1e-4}, steps=FAULT_AT), with_dear=True)
    with mock.patch.object(GlooLink, "announce", noting):
        run.model.module[6].register_forward_hook(lambda module, inputs, output: FailingBackward.apply(output))
        for x, y in run.batches():
            run.optimizer.zero_grad()
            run.loss(run.model(x), y).backward()
            run.optimizer.step()
        legs.clear()
        FailingBackward.error = ZeroDivisionError("the user's own")
        with pytest.raises(ZeroDivisionError):
            run.loss(run.model(x), y).backward()
        link, broken = run.state._link, list(legs)
        assert link.early_receives.legs and set(link.early_receives.legs.values()) < set(broken)
        if goes_on:
            run.state._reducer._in_force.pipeline.retire()  # as the first bucket of the next backward does
        else:
            run.state.detach()
        assert not link.early_receives.legs
        assert all(leg.is_done() for leg in broken)
    run.detach()


@pytest.mark.parametrize("goes_on", [True, False], ids=["next_backward", "detach"])
def test_a_broken_backward_leaves_no_announced_leg_open(on_ranks, goes_on) -> None:
    on_ranks(_legs_of_a_broken_backward, 2, goes_on)


def _parameters_before_the_fault() -> dict[str, torch.Tensor]:
    run = Run(Case(model=DeepNet, optimizer=SGD, steps=FAULT_AT), with_dear=False)
    for x, y in run.batches():
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        run.optimizer.step()
    return snapshot(run.model.module.state_dict())


class _UsersError(Exception):
    pass


def _exception_in_closure(run: Run) -> Iterator[Any]:
    """A closure that raises after its backward. The fuzzer has those of forwards, losses and step hooks."""
    for index, (x, y) in enumerate(run.batches()):

        def closure(index: int = index, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(run.model(x), y)
            loss.backward()
            if index % 5 == 4:
                raise _UsersError
            return loss

        try:
            yield run.optimizer.step(closure)
        except _UsersError:
            yield "no step"


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
def test_a_users_exception_costs_one_step_and_nothing_else(on_ranks, strict) -> None:
    check_case(Case(_exception_in_closure, model=DeepNet, strict=strict, pipelined=False), on_ranks)
