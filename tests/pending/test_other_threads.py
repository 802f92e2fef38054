"""Another thread looks at model, gradients and optimizer while the ranks train: a monitor, an average of weights,
an asynchronous checkpoint.

A thread that takes `p.grad` while `zero_grad()` or backward replaces it crashes without our hook, too, and without
DDP (torch 2.15): it needs a lock of the script's own. What it has taken it may look at whenever it likes.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from unittest import mock

import pytest

from ddp_crossover.watching.optimizer_snapshot import OptimizerSnapshot
from equivalence import Case, Run, check_case, snapshot, train_step
from stack_net import assert_same_ends, final_state, stack_case, train_alone

FIRST_LOOK = 2  # the first steps make the optimizer's state: a dict that grows must not be iterated over
LOOK_S = 0.3  # enough for one that waits for nothing


class Onlooker:
    """A run, as a thread sees it that was handed its objects at the beginning."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.parameters = list(run.model.module.parameters())
        self.gradients_change = threading.Lock()

    def state_dict(self) -> Any:
        return snapshot(self.run.model.state_dict())

    def norms(self) -> Any:
        return [p.detach().norm() for p in self.parameters]

    def deepcopy(self) -> Any:
        return snapshot(copy.deepcopy(self.run.model.module).state_dict())

    def optimizer_state_dict(self) -> Any:
        return snapshot(self.run.optimizer.state_dict())

    def gradients(self) -> Any:
        seen = []
        for p in self.parameters:
            with self.gradients_change:
                grad = p.grad
            # What was taken may be looked at later, also during the next backward.
            seen.append(grad.clone() if grad is not None else None)
        return seen

    def everything(self) -> Any:
        looks = (self.state_dict, self.norms, self.deepcopy, self.optimizer_state_dict, self.gradients)
        return [look() for look in looks]


Look = Callable[[Onlooker], Any]
LOOKS = [Onlooker.state_dict, Onlooker.norms, Onlooker.deepcopy, Onlooker.optimizer_state_dict, Onlooker.gradients]


@contextlib.contextmanager
def _looking(look: Callable[[], Any], seed: int) -> Iterator[None]:
    """A thread looks again and again, within the context."""
    ends, errors = threading.Event(), []
    draw = random.Random(seed)

    def work() -> None:
        try:
            while not ends.is_set():
                look()
                time.sleep(draw.choice([0, draw.uniform(0, 0.004)]))
        except BaseException:
            errors.append(traceback.format_exc())

    thread = threading.Thread(target=work, name="onlooker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(10)
    assert not thread.is_alive(), "the onlooker hangs"
    assert not errors, errors[0]


def _train_watched(case: Case, look: Look, watched: list[int]) -> dict[str, Any]:
    run = Run(case, with_dear=True)
    run.attach()
    onlooker = Onlooker(run)
    with contextlib.ExitStack() as stack:
        for index in range(case.steps):
            if index == FIRST_LOOK and run.rank in watched:
                stack.enter_context(_looking(lambda: look(onlooker), seed=run.rank))
            x, y = run.batch(index)
            with onlooker.gradients_change:
                run.optimizer.zero_grad()
            loss = run.loss(run.model(x), y)
            with onlooker.gradients_change:
                loss.backward()
            run.optimizer.step()
    return final_state(run)


@pytest.mark.parametrize("look", LOOKS)
def test_a_thread_that_looks_on_at_one_rank_changes_nothing(on_ranks, look) -> None:
    _check_watched(on_ranks, look, [0], view=False)


@pytest.mark.parametrize("view", [True, False], ids=["view", "copy"])
@pytest.mark.parametrize("look", [Onlooker.gradients, Onlooker.everything])
def test_threads_that_look_on_at_all_ranks_change_nothing(on_ranks, look, view) -> None:
    _check_watched(on_ranks, look, [0, 1], view)


def _check_watched(on_ranks: Callable[..., Any], look: Look, watched: list[int], view: bool) -> None:
    case = stack_case(view=view)
    expected = on_ranks(train_alone, 2, case)
    assert_same_ends(on_ranks(_train_watched, 2, case, look, watched), expected)


def _look_between_steps(run: Run) -> Iterator[Any]:
    run.attach()
    onlooker = Onlooker(run)
    with ThreadPoolExecutor(1) as thread:
        for index in range(run.case.steps):
            loss = train_step(run, *run.batch(index))
            looks = run.rank == 0 or index % 3 == 0
            yield loss, thread.submit(onlooker.everything).result(timeout=10) if looks else None


def test_between_two_steps_a_thread_sees_what_plain_ddp_shows(on_ranks) -> None:
    check_case(stack_case(_look_between_steps, steps=20), on_ranks)


def _look_between_backward_and_step(run: Run) -> Iterator[Any]:
    run.attach()
    onlooker = Onlooker(run)
    with ThreadPoolExecutor(1) as thread:
        for x, y in run.batches():
            run.optimizer.zero_grad()
            run.loss(run.model(x), y).backward()
            # Not waited for: it looks while `step()` runs.
            seen = thread.submit(onlooker.gradients)
            run.optimizer.step()
            yield seen.result(timeout=10)


@pytest.mark.parametrize("view", [True, False], ids=["view", "copy"])
def test_a_thread_that_reads_gradients_during_step_gets_all_of_them(on_ranks, view) -> None:
    check_case(stack_case(_look_between_backward_and_step, view), on_ranks)


def _look_at_the_state_while_an_update_is_written(run: Run) -> Iterator[Any]:
    """The last update that is pending: from the next one on, nothing tells a reader to wait but the update itself."""
    step = OptimizerSnapshot.step
    looks: list[Future[Any]] = []

    def look() -> Any:
        return snapshot(list(run.optimizer.state.values()))

    def watched(*args: Any, **kwargs: Any) -> None:
        if not run.state._reducer._in_force.pipeline.updates:
            looks.append(thread.submit(look))
            wait(looks, timeout=LOOK_S)
        step(*args, **kwargs)

    with ThreadPoolExecutor(1) as thread:
        for index, (x, y) in enumerate(run.batches()):
            looks.clear()
            is_watched = run.with_dear and index >= run.case.steps - 3
            with mock.patch.object(OptimizerSnapshot, "step", watched) if is_watched else contextlib.nullcontext():
                loss = run.loss(run.model(x), y)
            seen = looks[0].result(timeout=10) if is_watched else look()
            run.optimizer.zero_grad()
            loss.backward()
            run.optimizer.step()
            yield loss, seen


def test_a_thread_that_reads_the_state_waits_for_the_update_that_is_being_written(on_ranks) -> None:
    check_case(stack_case(_look_at_the_state_while_an_update_is_written, steps=14), on_ranks)
