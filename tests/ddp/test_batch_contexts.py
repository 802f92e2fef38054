"""``state.batch()`` and ``state.batches()``: the ends of epochs, what is refused, and faults."""

from __future__ import annotations

import contextlib
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.ddp.refusals import statistics_of_a_rank
from harness import run_faulty_ranks
from heard import heard
from models import DeepNet, OddNet
from weighted_loops import STEPS, Weighted, WeightedRun, plain, samples_of, sgd

GROUP_TIMEOUT_S = 4.0
GRACE_S = 12.0


def _run(**options) -> WeightedRun:
    return WeightedRun(Weighted(plain, **options), on_ranks=True)


def _batches_of(rank: int, epoch: int) -> list[int]:
    """The steps of which a rank has samples: ranks have different numbers, one of them none."""
    return list(range(10 * epoch, 10 * epoch + (4 * rank if epoch else 7 - 3 * rank)))


def _train_to_the_end_of_all() -> list[int]:
    run = _run()
    alone = WeightedRun(Weighted(plain), on_ranks=False)
    steps = []
    for epoch in range(2):
        turns = 0
        for batch in run.state.batches(_batches_of(run.rank, epoch)):
            turns += 1
            run.optimizer.zero_grad()
            with run.state.batch(0 if batch is None else 3 + run.rank):
                if batch is not None:
                    x, y = samples_of(batch, torch.float64)
                    run.loss(run.model(x[: 3 + run.rank]), y[: 3 + run.rank]).backward()
            run.optimizer.step()
        steps.append(turns)
        of_ranks = [_batches_of(rank, epoch) for rank in range(run.world_size)]
        for turn in range(turns):
            parts = [
                (rank, *samples_of(of_ranks[rank][turn], torch.float64))
                for rank in range(run.world_size)
                if turn < len(of_ranks[rank])
            ]
            x = torch.cat([x[: 3 + rank] for rank, x, _ in parts])
            y = torch.cat([y[: 3 + rank] for rank, _, y in parts])
            alone.optimizer.zero_grad()
            alone.loss(alone.model(x), y).backward()
            alone.optimizer.step()
    for ours, other in zip(run.net.parameters(), alone.net.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), other.detach(), rtol=1e-12, atol=1e-12)
    run.state.detach()
    return steps


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_have_different_numbers_of_batches(on_ranks, world_size) -> None:
    assert on_ranks(_train_to_the_end_of_all, world_size) == [[7, 4 * (world_size - 1)]] * world_size


def _refused(kind: str) -> str:
    run = _run(model=OddNet) if kind != "not weighted" else None
    x, y = samples_of(0, torch.float64)
    try:
        if run is None:
            ddp = DistributedDataParallel(DeepNet())
            with dx.attach(ddp, sgd(ddp.parameters())).batch(3):
                pass
        elif kind == "forward outside":
            run.model(x)
        elif kind == "backward outside":
            with run.state.batch(3):
                loss = run.model(x).sum()
            loss.backward()
        elif kind == "nested":
            with run.state.batch(3), run.state.batch(3):
                pass
        elif kind == "negative":
            with run.state.batch(-1):
                pass
        elif kind == "fraction":
            with run.state.batch(2.5):
                pass
        elif kind == "no samples":
            with run.state.batch(0):
                run.loss(run.model(x), y).backward()
        elif kind == "added to others":
            with run.model.no_sync(), run.state.batch(3):
                run.loss(run.model(x), y).backward()
            with run.state.batch(0):
                run.loss(run.model(x), y).backward()
        elif kind == "detached":
            run.state.detach()
            with run.state.batch(3 + run.rank):
                pass
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not weighted", r"RuntimeError: state\.batch\(\) weights gradients.*attach with weighted=True"),
        ("forward outside", r"RuntimeError: this model is attached with weighted=True: put its forward"),
        ("backward outside", r"RuntimeError: this model is attached with weighted=True: put its forward"),
        ("nested", r"RuntimeError: state\.batch\(\) inside of state\.batch\(\)"),
        ("negative", r"ValueError: .*0 or more, got -1"),
        ("fraction", r"TypeError: .*a whole number, got 2\.5"),
        ("no samples", r"ValueError: no rank has a sample"),
        ("added to others", r"RuntimeError: this batch has no sample, and its gradients would be added"),
        ("detached", r"RuntimeError: ranks have from 3 to 4 samples in this batch, and the model is not attached"),
    ],
)
def test_what_is_refused(on_ranks, kind, message) -> None:
    for result in on_ranks(_refused, 2, kind):
        assert re.match(message, result), result


def _take_part(setting: str) -> str:
    ddp = DistributedDataParallel(DeepNet(), **{setting: True})
    state = dx.attach(ddp, sgd(ddp.parameters()), weighted=True)
    try:
        with state.batch(0):
            pass
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("setting", ["find_unused_parameters", "static_graph"])
def test_ddp_must_see_which_parameters_are_used(on_ranks, setting) -> None:
    for result in on_ranks(_take_part, 2, setting):
        assert re.search(rf"{setting}=True.*run forward and backward with any sample", result), result


def _forwards_without_backward() -> None:
    """A forward whose loss is dropped does not count, nor does a batch that has raised."""
    run, alone = _run(), WeightedRun(Weighted(plain), on_ranks=False)
    for step in range(STEPS):
        x, y = run.samples(step)
        with run.state.batch(5):
            run.model(torch.ones(5, 7, dtype=torch.float64))
        with contextlib.suppress(KeyError), run.state.batch(8):
            raise KeyError
        for one, (part_x, part_y) in ((run, (x, y)), (alone, alone.samples(step))):
            one.optimizer.zero_grad()
            with one.batch(len(part_x)):
                one.loss(one.model(part_x), part_y).backward()
            one.optimizer.step()
    for ours, other in zip(run.net.parameters(), alone.net.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), other.detach(), rtol=1e-12, atol=1e-12)
    run.state.detach()


def test_batches_without_backward_do_not_count(on_ranks) -> None:
    on_ranks(_forwards_without_backward, 2)


def _inner_no_sync() -> str:
    run = _run()
    x, y = samples_of(0, torch.float64)
    try:
        with run.state.batch(len(x)), run.model.no_sync():
            run.loss(run.model(x), y).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_batch_that_reduces_nothing_is_refused(on_ranks) -> None:
    """Whether it is a step, or a micro-batch of one, is not known, and a rank without samples could not do the same."""
    for said in on_ranks(_inner_no_sync, 2):
        assert "enter no_sync() before state.batch()" in said


def _rank_without_micro_batches() -> None:
    run, alone = _run(), WeightedRun(Weighted(plain), on_ranks=False)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        x, y = samples_of(step, torch.float64)
        half = len(x) // 2
        with run.state.batch(len(x) if run.rank == step % 2 else 0):
            for low, high in ((0, half), (half, len(x))):
                with run.no_sync(is_last=high == len(x)):
                    if run.rank == step % 2:
                        (run.loss(run.model(x[low:high]), y[low:high]) / 2).backward()
        run.optimizer.step()
        alone.optimizer.zero_grad()
        alone.loss(alone.model(x), y).backward()
        alone.optimizer.step()
    for ours, other in zip(run.net.parameters(), alone.net.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), other.detach(), rtol=1e-12, atol=1e-12)
    run.state.detach()


def test_a_rank_without_samples_goes_through_the_loop_over_micro_batches(on_ranks) -> None:
    on_ranks(_rank_without_micro_batches, 2)


def _switched_off(equal: bool) -> str:
    os.environ["DDP_CROSSOVER"] = "off"
    try:
        run = _run()
        x, y = samples_of(0, torch.float64)
        with run.state.batch(3 if equal else 3 + run.rank):
            run.loss(run.model(x), y).backward()
    except RuntimeError as error:
        return str(error)
    finally:
        del os.environ["DDP_CROSSOVER"]
    return "trained"


def test_the_switch_trains_plain_ddp_where_that_is_right(on_ranks) -> None:
    assert on_ranks(_switched_off, 2, True) == ["trained"] * 2
    for result in on_ranks(_switched_off, 2, False):
        assert "without DDP_CROSSOVER=off, or give all ranks equal batches" in result


def _loop_with_the_switch(what: str) -> str:
    os.environ["DDP_CROSSOVER"] = "off"
    try:
        run = _run()
        sampler = dx.BalancedSampler(24, 12)
        run.state.balance(sampler)
        indices = list(sampler) if what == "equal" else list(sampler)[run.rank :]
        for batch in run.state.batches(indices):
            run.optimizer.zero_grad()
            with run.state.batch(len(batch)):
                x, y = samples_of(0, torch.float64)
                run.loss(run.model(x[: len(batch)]), y[: len(batch)]).backward()
            run.optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        del os.environ["DDP_CROSSOVER"]
    return "trained"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("equal", "trained"),
        ("unequal", "some ranks have no batch left.*without DDP_CROSSOVER=off"),
    ],
)
def test_loops_over_weighted_batches_run_with_the_switch(on_ranks, what, message) -> None:
    for said in on_ranks(_loop_with_the_switch, 2, what):
        assert re.search(message, said), said


class _Norms(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5))


def _attach_with_batch_norm() -> list[str]:
    with heard() as said:
        ddp = DistributedDataParallel(_Norms())
        dx.attach(ddp, sgd(ddp.parameters()), weighted=True).detach()
    assert statistics_of_a_rank(nn.SyncBatchNorm.convert_sync_batchnorm(_Norms())) is None
    return said


def test_batch_norm_is_named_by_rank_0(on_ranks) -> None:
    first, second = on_ranks(_attach_with_batch_norm, 2)
    assert re.search(r"1 and 1 more \(BatchNorm\) takes statistics of each rank's own batch", "\n".join(first)), first
    assert not any("BatchNorm" in line for line in second)


def _train_until_one_is_killed() -> str:
    run = _run()
    for step, (x, y) in enumerate(run.steps()):
        run.optimizer.zero_grad()
        with run.state.batch(len(x)):
            if step == 7 and run.rank == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            run.loss(run.model(x), y).backward()
        run.optimizer.step()
    return "trained to the end"


def test_a_rank_that_is_killed_before_it_tells_its_count_raises_everywhere() -> None:
    outcomes = run_faulty_ranks(_train_until_one_is_killed, 3, group_timeout_s=GROUP_TIMEOUT_S)
    assert outcomes[-1].exitcode == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.error is not None, outcome.result
        assert re.search(r"rank \d", outcome.error.strip().splitlines()[-1]), outcome.error
        assert outcome.seconds < GROUP_TIMEOUT_S + GRACE_S
