"""Processes forked while an update is pending: a data loader's workers, an evaluation on the side, a script's helpers.

A child has the memory of its parent and none of its threads: nothing arrives there any more, and a lock that another
thread held stays locked for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from equivalence import Run, check_case, train_step
from harness import run_ranks
from models import INPUTS, OUTPUTS
from rank_process import dump, load
from stack_net import Child, evaluate, stack_case

STEPS = 12
EVERY = 6  # after so many steps something is forked; the first few are not pipelined yet
SPAWN_TIMEOUT_S = 60.0  # a new interpreter imports torch

check_on_parents = partial(check_case, on_ranks=partial(run_ranks, have_children=True))


def _forking_steps(run: Run) -> Iterator[tuple[bool, Tensor]]:
    """Every step's loss, and whether it is time to fork."""
    run.attach()
    for index in range(run.case.steps):
        loss = train_step(run, *run.batch(index))
        yield index % EVERY == EVERY - 1, loss


def _evaluate_in_a_child_of_one_rank(run: Run) -> Iterator[Any]:
    for forks, loss in _forking_steps(run):
        forks = forks and run.rank == 0
        yield loss, Child(lambda: evaluate(run.model.module)).result() if forks else None


def _train_on_beside_the_child(run: Run) -> Iterator[Any]:
    """The child is slow: the parent has taken steps and forked again before it looks at the model."""

    def evaluate_late() -> Tensor:
        time.sleep(0.1)
        return evaluate(run.model.module)

    children = []
    for forks, loss in _forking_steps(run):
        if forks:
            children.append(Child(evaluate_late))
        yield loss
    yield [child.result() for child in children]


def _read_everything_in_a_child(run: Run) -> Iterator[Any]:
    parameters = list(run.model.module.parameters())

    def read() -> Any:
        held = [p.detach().clone() for p in parameters]
        return held, copy.deepcopy(run.model.module).state_dict(), run.optimizer.state_dict()

    for forks, loss in _forking_steps(run):
        yield loss, Child(read).result() if forks else None


def _read_gradients_in_a_child(run: Run) -> Iterator[Any]:
    parameters = list(run.model.module.parameters())

    def read() -> list[Tensor]:
        return [p.grad.clone() for p in parameters]

    run.attach()
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        before = Child(read).result() if index % EVERY == EVERY - 1 else None
        run.optimizer.step()
        after = Child(read).result() if index % EVERY == EVERY - 2 else None
        yield before, after


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize(
    "loop",
    [
        _evaluate_in_a_child_of_one_rank,
        _train_on_beside_the_child,
        _read_everything_in_a_child,
        _read_gradients_in_a_child,
    ],
)
def test_a_forked_child_sees_what_plain_ddp_shows(on_ranks, loop, strict) -> None:
    check_case(stack_case(loop, steps=STEPS, strict=strict), on_ranks)


def _exit_in_a_child(run: Run) -> Iterator[Any]:
    for forks, loss in _forking_steps(run):
        if forks and run.rank == 0:
            _let_a_child_exit()
        yield loss


def _let_a_child_exit() -> None:
    """What `sys.exit(0)` does at the end of a script: exit handlers and finalizers.

    The exit code says nothing: in plain DDP, too, gloo may crash where it finds its threads gone.
    """
    pid = os.fork()
    if pid == 0:
        try:
            # `sys.exit` itself would unwind into the harness.
            atexit._run_exitfuncs()
            gc.collect()
            os._exit(0)
        finally:
            os._exit(99)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the forked child does not exit")


def test_a_forked_child_can_exit_and_its_parent_does_not_notice() -> None:
    """On fresh ranks: the exit handlers of ranks that are used again know of tests before this one."""
    check_case(stack_case(_exit_in_a_child, steps=2 * EVERY), run_ranks)


def _fork_beside_a_reader(run: Run) -> Iterator[Any]:
    ends = threading.Event()

    def read() -> None:
        while not ends.is_set():
            run.model.state_dict()
            run.optimizer.state_dict()
            time.sleep(0.0005)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        for forks, loss in _forking_steps(run):
            # On one rank: the other has nothing to wait for.
            seen = Child(lambda: evaluate(run.model.module)).result() if forks and run.rank == 0 else None
            yield loss, seen
            assert reader.is_alive()
    finally:
        ends.set()
        reader.join(10)


def test_a_child_forked_while_another_thread_reads_is_not_locked_out(on_ranks) -> None:
    check_case(stack_case(_fork_beside_a_reader, steps=6 * EVERY), on_ranks)


class _HardExamples(Dataset[tuple[Tensor, Tensor]]):
    """Of two candidates gives the one that the model, as it was when the worker was forked, does worse on."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model = model
        self.rank = rank

    def __len__(self) -> int:
        return 8

    @torch.no_grad()
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * self.rank + index)
        x = torch.randn(2, INPUTS, generator=generator)
        y = torch.randn(2, OUTPUTS, generator=generator)
        size = torch.stack([p.norm() for p in self.model.parameters()]).sum()
        hardest = (self.model(x) - y).square().mean(1).argmax()
        return x[hardest] + size / 1e3, y[hardest]


def _mine_hard_examples(persistent: bool, run: Run) -> Iterator[Any]:
    run.attach()
    for index in range(6):
        train_step(run, *run.batch(index))
    loader = DataLoader(
        _HardExamples(run.model.module, run.rank),
        batch_size=4,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=persistent,
        timeout=10,
    )
    for _ in range(3):
        for x, y in loader:
            loss = train_step(run, x, y)
            yield loss, x


@pytest.mark.parametrize("persistent", [False, True], ids=["new_workers", "persistent_workers"])
def test_workers_of_a_data_loader_may_ask_the_model(persistent) -> None:
    check_on_parents(stack_case(partial(_mine_hard_examples, persistent), steps=12))


def _answer(connection: Connection, models: list[Any]) -> None:
    connection.send_bytes(dump([evaluate(_model(model)) for model in models]))


def _model(model: Any) -> nn.Module:
    """A module as it is, or one with this state."""
    if isinstance(model, nn.Module):
        return model
    fresh: nn.Module = stack_case().model()
    fresh.load_state_dict(model)
    return fresh


def _ask_a_process(method: str, models: list[Any]) -> Any:
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, models))
    process.start()
    theirs.close()
    try:
        with contextlib.closing(ours):
            assert ours.poll(SPAWN_TIMEOUT_S / 2), "the process does not answer"
            answer = load(ours.recv_bytes())
        process.join(10)
        assert process.exitcode == 0
        return answer
    finally:
        process.kill()


def _ask_processes(method: str, of: Callable[[nn.Module], list[Any]], run: Run) -> Iterator[Any]:
    for forks, loss in _forking_steps(run):
        asks = forks and run.rank == 0
        yield loss, _ask_a_process(method, of(run.model.module)) if asks else None


def _itself(module: nn.Module) -> list[Any]:
    return [module]


def _copied(module: nn.Module) -> list[Any]:
    return [module.state_dict(), copy.deepcopy(module)]


def test_a_forked_process_can_be_given_the_model() -> None:
    check_on_parents(stack_case(partial(_ask_processes, "fork", _itself), steps=STEPS))


@pytest.mark.nightly
@pytest.mark.parametrize("of", [_copied, _itself], ids=["state_dict_and_copy", "itself"])
def test_a_spawned_process_can_be_given_the_model(of) -> None:
    case = stack_case(partial(_ask_processes, "spawn", of), steps=EVERY + 2)
    check_case(case, partial(run_ranks, timeout_s=SPAWN_TIMEOUT_S, have_children=True))
