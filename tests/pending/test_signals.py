"""A signal handler saves a checkpoint in the middle of anything, as clusters ask for before they take a machine away;
or it raises, and the script saves afterwards.

Python runs a handler between two bytecodes of the main thread: inside our hooks, in `step()`, in a wait for the link.
SIGUSR1 is taken: the harness has the stacks of a hanging rank written with it.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp_crossover.watching.optimizer_snapshot import OptimizerSnapshot
from equivalence import Run, check_case, is_finite, train_step
from harness import run_faulty_ranks
from models import INPUTS
from stack_net import StackNet, assert_same_ends, final_state, stack_case, train_alone

SAVES = 100  # on each rank
FIRST_SIGNAL = 2  # before the first step there is no state of the optimizer
MEAN_GAP_S = 0.003
MOST_STEPS = 2000
_SENDER = """
import os, random, sys, time
pid, number, seed, mean_gap_s = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
draw = random.Random(seed)
while sys.stdin.buffer.read(1):  # the handler has returned
    time.sleep(draw.uniform(0, 2 * mean_gap_s))
    os.kill(pid, number)
"""


@contextlib.contextmanager
def _handled(number: int, handler: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def _signals_of_another_process(handler: Callable[[], None], seed: int) -> Iterator[None]:
    """A process of its own knows nothing of locks and moments here."""
    arguments = [os.getpid(), int(signal.SIGUSR2), seed, MEAN_GAP_S]
    command = [sys.executable, "-I", "-S", "-c", _SENDER, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0) as sender:
        assert sender.stdin is not None
        asks = sender.stdin.fileno()

        def answer(*_: Any) -> None:
            handler()
            os.write(asks, b".")

        with _handled(signal.SIGUSR2, answer):
            os.write(asks, b".")
            try:
                yield
            finally:
                sender.kill()
                sender.wait()


@contextlib.contextmanager
def _signals_of_a_timer(handler: Callable[[], None], seed: int) -> Iterator[None]:
    draw = random.Random(seed)

    def ring(*_: Any) -> None:
        handler()
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 2 * MEAN_GAP_S))

    with _handled(signal.SIGALRM, ring):
        signal.setitimer(signal.ITIMER_REAL, MEAN_GAP_S)
        try:
            yield
        finally:
            # First: a handler that runs just now would set the timer again.
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0)


Signals = Callable[[Callable[[], None], int], contextlib.AbstractContextManager[None]]


def _checkpoint(run: Run) -> bytes:
    buffer = io.BytesIO()
    state = {"model": run.model.module.state_dict(), "optimizer": run.optimizer.state_dict()}
    torch.save(state, buffer)
    return buffer.getvalue()


def _train_with_signals(signals: Signals, reads_gradients: bool, view: bool) -> dict[str, Any]:
    """Train until every rank has saved often enough; the ranks agree on it, as on an early stop."""
    run = Run(stack_case(view=view), with_dear=True)
    run.attach()
    saved: list[bytes] = []

    def save() -> None:
        if reads_gradients:
            gradients = [p.grad.clone() for p in run.model.module.parameters() if p.grad is not None]
            assert is_finite(gradients)
        saved.append(_checkpoint(run))

    steps = 0
    with contextlib.ExitStack() as stack:
        while steps < MOST_STEPS:
            if steps == FIRST_SIGNAL:
                stack.enter_context(signals(save, run.rank))
            train_step(run, *run.batch(steps))
            steps += 1
            if steps % 20 == 0 and _all_ranks_have(len(saved) >= SAVES):
                break
    end = final_state(run)
    for index, data in enumerate(saved):
        _check_whole(data, resumes=index % 5 == 0)
    return {"steps": steps, "saved": len(saved), "end": end}


def _all_ranks_have(enough: bool) -> bool:
    flag = torch.tensor(float(enough))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def _check_whole(data: bytes, resumes: bool = True) -> None:
    """All keys, finite numbers; and it loads into a fresh model and optimizer, which can take a step."""
    checkpoint = torch.load(io.BytesIO(data))
    model = StackNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _step_alone(model, optimizer)
    normal = optimizer.state_dict()
    assert checkpoint["optimizer"]["param_groups"] == normal["param_groups"]
    seen = {index: state.keys() for index, state in checkpoint["optimizer"]["state"].items()}
    assert seen == {index: state.keys() for index, state in normal["state"].items()}
    assert is_finite(checkpoint)
    if not resumes:
        return
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    _step_alone(model, optimizer)
    assert is_finite(model.state_dict())


def _step_alone(model: StackNet, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, INPUTS)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("signals", "reads_gradients"),
    [(_signals_of_another_process, True), (_signals_of_a_timer, False)],
    ids=["of_another_process", "of_a_timer"],
)
def test_checkpoints_saved_by_a_signal_handler_are_whole_and_change_nothing(on_ranks, signals, reads_gradients) -> None:
    view = not reads_gradients
    seen = on_ranks(_train_with_signals, 2, signals, reads_gradients, view)
    assert all(one["saved"] >= SAVES for one in seen)
    expected = on_ranks(train_alone, 2, stack_case(view=view, steps=seen[0]["steps"]))
    assert_same_ends([one["end"] for one in seen], expected)


def _look_at_zeros_during_updates(run: Run) -> Iterator[Any]:
    """The handler looks at gradients that were set to zero after `step()`, in the memory that an update reads."""
    step, looks = OptimizerSnapshot.step, 0
    seen: list[list[float]] = []

    def interrupted(*args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGUSR2)
        step(*args, **kwargs)

    def look(*_: Any) -> None:
        seen.append([float(p.grad.abs().sum()) for p in run.model.parameters() if p.grad is not None])

    with _handled(signal.SIGUSR2, look), mock.patch.object(OptimizerSnapshot, "step", interrupted):
        for x, y in run.batches():
            seen.clear()
            loss = run.loss(run.model(x), y)
            looks += len(seen)
            assert not any(map(any, seen))
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)
            yield loss
    assert bool(looks) is run.with_dear


def test_a_signal_handler_that_looks_at_zeros_leaves_the_update_its_gradients(on_ranks) -> None:
    check_case(stack_case(_look_at_zeros_during_updates, view=True), on_ranks)


class _Stop(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Stop


def _train_until_stopped(run: Run, after_s: float) -> bool:
    """Whether it was stopped, and not at its end already."""
    with _handled(signal.SIGALRM, _stop):
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            for index in range(FIRST_SIGNAL, run.case.steps):
                train_step(run, *run.batch(index))
            signal.setitimer(signal.ITIMER_REAL, 0)
        # Backward hands on an exception in a hook as it pleases.
        except (_Stop, RuntimeError):
            # As without us, if it has hit the end of somebody's `torch.no_grad()`.
            torch.set_grad_enabled(True)
            return True
    return False


def _stop_again_and_again(trials: int) -> int:
    draw, stopped = random.Random(11), 0
    for _ in range(trials):
        run = Run(stack_case(steps=14), with_dear=True)
        run.attach()
        for index in range(FIRST_SIGNAL):
            train_step(run, *run.batch(index))
        stopped += _train_until_stopped(run, after_s=draw.uniform(0.001, 0.06))
        _check_whole(_checkpoint(run))
        run.detach()
    return stopped


def test_after_an_exception_of_a_signal_handler_a_checkpoint_can_be_saved(on_ranks) -> None:
    trials = 30
    [stopped] = on_ranks(_stop_again_and_again, 1, trials)
    assert stopped > trials // 2, "most trials ended before the signal"


def _stop_the_first_rank(after_s: float) -> bytes | str:
    run = Run(stack_case(steps=400), with_dear=True)
    run.attach()
    for index in range(FIRST_SIGNAL):
        train_step(run, *run.batch(index))
    if run.rank == 0:
        assert _train_until_stopped(run, after_s)
        return _checkpoint(run)
    try:
        for index in range(FIRST_SIGNAL, run.case.steps):
            train_step(run, *run.batch(index))
    except Exception as error:
        return str(error)
    return "trained to the end without its peer"


@pytest.mark.parametrize("after_s", [0.05, 0.081, 0.107])
def test_a_rank_stopped_by_a_signal_can_save_and_its_peer_does_not_hang(after_s) -> None:
    first, second = run_faulty_ranks(_stop_the_first_rank, 2, after_s, group_timeout_s=5.0, timeout_s=25.0)
    assert first.error is None, first.error
    _check_whole(first.result)
    assert second.error is None, second.error
    assert "without its peer" not in second.result
