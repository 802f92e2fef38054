"""Micro-batches that ranks take as they get done: each sample once, replayed bit for bit, and what is refused."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover.ddp.shared_batch import Cut
from harness import run_faulty_ranks
from weighted_loops import SAMPLES, STEPS, Weighted, WeightedRun, plain, samples_of

GROUP_TIMEOUT_S = 4.0
GRACE_S = 12.0


def _run() -> WeightedRun:
    return WeightedRun(Weighted(plain, dtype=torch.float32), on_ranks=True)


def _train_shared(tickets: list[list[int]] | None, sleeps: bool, first: int | None) -> dict[str, Any]:
    run = _run()
    taken, seen = [], []
    for step in range(STEPS):
        x, y = samples_of(step, torch.float32)
        run.optimizer.zero_grad()
        shared = run.state.share(list(range(SAMPLES)), size=1, first=first, tickets=tickets and tickets[step])
        for indices in shared:
            if sleeps:
                time.sleep(0.004 * (1 + (run.rank + step) % 3))
            seen += [(step, index) for index in indices]
            run.loss(run.model(x[indices]), y[indices]).backward()
        run.optimizer.step()
        taken.append(shared.tickets)
    parameters = torch.cat([p.detach().flatten() for p in run.net.parameters()])
    run.state.detach()
    return {"tickets": taken, "seen": seen, "parameters": parameters}


def _train_and_replay(first: int | None) -> dict[str, Any]:
    one = _train_shared(None, True, first)
    other = _train_shared(one["tickets"], False, first)
    assert other["tickets"] == one["tickets"]
    assert torch.equal(one["parameters"], other["parameters"])
    return one


@pytest.mark.parametrize("first", [None, 2])
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.quick), 3, 4])
def test_each_sample_is_taken_once_and_a_replay_has_the_same_bits(on_ranks, world_size, first) -> None:
    results = on_ranks(_train_and_replay, world_size, first)
    seen = sorted(sample for one in results for sample in one["seen"])
    assert seen == [(step, index) for step in range(STEPS) for index in range(SAMPLES)]
    assert all(torch.equal(one["parameters"], results[0]["parameters"]) for one in results)
    shares = {tuple(map(len, one["tickets"])) for one in results}
    assert first or len(shares) > 1, "a rank that sleeps for longer takes fewer"


@given(length=st.integers(1, 200), size=st.integers(1, 30), first=st.integers(1, 60), world_size=st.integers(1, 8))
def test_each_sample_is_in_one_micro_batch(length, size, first, world_size) -> None:
    cut = Cut(length, size, first, world_size)
    micros = [cut.micro(ticket) for ticket in range(cut.tickets)]
    assert [sample for micro in micros for sample in range(micro.low, micro.high)] == list(range(length))
    assert all(micro.samples == (first if ticket < world_size else size) for ticket, micro in enumerate(micros[:-1]))


def _share_in_few_parts() -> list[int]:
    run = _run()
    x, y = samples_of(0, torch.float32)
    for _ in range(8):
        run.optimizer.zero_grad()
        shared = run.state.share((x, {"y": y}), size=SAMPLES)
        for part_x, part in shared:
            run.loss(run.model(part_x), part["y"]).backward()
        run.optimizer.step()
    run.state.detach()
    return shared.tickets


def test_ranks_for_which_nothing_is_left_take_part(on_ranks) -> None:
    assert on_ranks(_share_in_few_parts, 3) == [[0], [], []]


def _refused(kind: str) -> str:
    run = _run()
    x, y = samples_of(0, torch.float32)
    try:
        if kind == "gradients":
            run.net(x).sum().backward()
            list(run.state.share(x, size=2))
        elif kind == "tickets":
            run.state.share(x, size=4, tickets=[0, 1])
        elif kind == "twice":
            shared = run.state.share(x, size=4)
            for part in shared:
                run.model(part).sum().backward()
            list(shared)
        elif kind == "lengths":
            run.state.share((x, y[:3]), size=4)
        elif kind == "type":
            run.state.share(iter(x), size=4)
        elif kind == "empty":
            run.state.share([], size=4)
        elif kind == "size":
            run.state.share(x, size=0)
        elif kind == "first":
            run.state.share(x, size=2, first=-1)
        elif kind == "backward":
            for _ in run.state.share(list(range(2)), size=1):
                pass
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.optimizer.zero_grad()
        run.state.detach()
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gradients", r"RuntimeError: .* 0\.weight has one already: call optimizer\.zero_grad\(\)"),
        ("tickets", r"ValueError: tickets= must hold each of the numbers 0 to 2 on one rank.*\[\[0, 1\], \[0, 1\]\]"),
        ("twice", r"RuntimeError: this shared batch has been iterated over"),
        ("lengths", r"ValueError: share\(\) got parts with different numbers of samples: \[3, 12\]"),
        ("type", r"TypeError: share\(\) takes a tensor, a list of samples.*pass the indices"),
        ("empty", r"ValueError: share\(\) got a batch without samples"),
        ("size", r"ValueError: .*size=0"),
        ("first", r"ValueError: .*first=-1"),
        ("backward", r"RuntimeError: the last micro-batch of share\(\) has had no backward"),
    ],
)
def test_what_is_refused(on_ranks, kind, message) -> None:
    for result in on_ranks(_refused, 2, kind):
        assert re.match(message, result), result


def _train_until_one_is_killed() -> str:
    run = _run()
    for step in range(STEPS):
        x, y = samples_of(step, torch.float32)
        run.optimizer.zero_grad()
        for part_x, part_y in run.state.share((x, y), size=1):
            if step == 7 and run.rank == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            run.loss(run.model(part_x), part_y).backward()
        run.optimizer.step()
    return "trained to the end"


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank_raises_everywhere(world_size) -> None:
    outcomes = run_faulty_ranks(_train_until_one_is_killed, world_size, group_timeout_s=GROUP_TIMEOUT_S)
    assert outcomes[-1].exitcode == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.error is not None, outcome.result
        assert re.search(r"rank \d", outcome.error.strip().splitlines()[-1]), outcome.error
        assert outcome.seconds < GROUP_TIMEOUT_S + GRACE_S
