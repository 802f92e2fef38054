"""``state.batch()`` and ``state.batches()``: the ends of epochs, what is refused, and faults."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.hook.refusals import statistics_of_a_rank
from harness import run_faulty_ranks
from heard import heard
from models import DeepNet
from weighted_loops import Weighted, WeightedRun, plain, samples_of, sgd
from weighted_ranks import STEPS, Ranks, mse, usual

GROUP_TIMEOUT_S = 4.0
GRACE_S = 12.0


def _batches_of(rank: int, epoch: int) -> list[int]:
    """The steps of which a rank has samples: ranks have different numbers, one of them none."""
    return list(range(10 * epoch, 10 * epoch + (4 * rank if epoch else 7 - 3 * rank)))


def _train_to_the_end_of_all() -> list[int]:
    run = WeightedRun(Weighted(plain), on_ranks=True)
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


def test_ranks_have_different_numbers_of_batches(on_ranks) -> None:
    assert on_ranks(_train_to_the_end_of_all, 3) == [[7, 8]] * 3


def _failing(count: int) -> Iterator[int]:
    yield from range(count)
    raise OSError("disk")


def _train_until_the_loader_fails() -> tuple[int, str]:
    ranks = Ranks()
    done = 0
    try:
        for number in ranks.state.batches(_failing(2)):
            ranks.step(number, usual)
            done += 1
    except OSError as error:
        return done, str(error)
    return done, "nothing"


def test_batches_before_one_that_cannot_be_loaded_are_trained_on(on_ranks) -> None:
    assert on_ranks(_train_until_the_loader_fails, 2) == [(2, "disk")] * 2


def _not_weighted(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    ddp = DistributedDataParallel(DeepNet())
    with dx.attach(ddp, sgd(ddp.parameters())).batch(3):
        pass


def _forward_outside(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    ranks.model(x)


def _backward_outside(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    with ranks.state.batch(3):
        loss = ranks.model(x).sum()
    loss.backward()


def _nested(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    with ranks.state.batch(3), ranks.state.batch(3):
        pass


def _negative(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    with ranks.state.batch(-1):
        pass


def _fraction(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    with ranks.state.batch(2.5):
        pass


def _no_samples_anywhere(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    with ranks.state.batch(0):
        mse(ranks.model(x), y).backward()


def _of_no_sample_and_added_to_others(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    with ranks.model.no_sync():
        ranks.backward(x, y)
    with ranks.state.batch(0):
        mse(ranks.model(x), y).backward()


def _the_same_and_ddp_wants_a_forward(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    ranks = Ranks({"find_unused_parameters": True})
    _of_no_sample_and_added_to_others(ranks, x, y)


def _reduced_by_no_micro_batch(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    """Whether it is a step, or a micro-batch of one, is not known, and a rank without samples could not do the same."""
    with ranks.state.batch(4), ranks.model.no_sync():
        mse(ranks.model(x[:4]), y[:4]).backward()


def _around_a_step_with_a_closure(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        ranks.optimizer.zero_grad()
        loss = mse(ranks.model(x[:4]), y[:4])
        loss.backward()
        return loss

    for _ in range(STEPS):
        with ranks.state.batch(4):
            ranks.optimizer.step(closure)


def _empty_in_eval_mode(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    ranks.model.eval()
    with ranks.state.batch(0):
        pass


def _empty_where_ddp_looks_for_unused_parameters(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    ranks = Ranks({"find_unused_parameters": True})
    with ranks.state.batch(0):
        pass


def _empty_where_the_graph_is_static(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    ranks = Ranks({"static_graph": True})
    with ranks.state.batch(0):
        pass


def _repeated_with(count: int, ranks: Ranks, x: Tensor, y: Tensor) -> None:
    with contextlib.suppress(KeyError), ranks.state.batch(4):
        ranks.model(x[:4])
        raise KeyError("out of memory")
    try:
        with ranks.state.batch(count):
            if count:
                mse(ranks.model(x[:count]), y[:count]).backward()
    finally:
        ranks.backward(x[:4], y[:4])
        ranks.state.detach()


def _unequal_after_detach(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    ranks.state.detach()
    with ranks.state.batch(3 + ranks.rank):
        pass


def _adds_up_to_unequal_after_detach(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    first = 2 if ranks.rank == 0 else 6
    with ranks.model.no_sync():
        ranks.backward(x[:first], y[:first])
    ranks.state.detach()
    ranks.backward(x[:2], y[:2])


def _loop_goes_on_after_detach(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    for number in ranks.state.batches(range(4)):
        ranks.step(number, usual, sizes=(6, 6))
        if number == 1:
            ranks.state.detach()


def _error_of(refused: Callable[[Ranks, Tensor, Tensor], None]) -> str:
    try:
        refused(Ranks(), *samples_of(0, torch.float64))
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


OUTSIDE = r"RuntimeError: this model is attached with weighted=True: put its forward"
ANY_SAMPLE = "=True.*run forward and backward with any sample"
LESS_THAN_TOLD = "the others knew of its 4 samples.*multiply the loss by 0"


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (_not_weighted, r"RuntimeError: state\.batch\(\) weights gradients.*attach with weighted=True"),
        (_forward_outside, OUTSIDE),
        (_backward_outside, OUTSIDE),
        (_nested, r"RuntimeError: state\.batch\(\) inside of state\.batch\(\)"),
        (_negative, r"ValueError: .*0 or more, got -1"),
        (_fraction, r"TypeError: .*a whole number, got 2\.5"),
        (_no_samples_anywhere, "ValueError: no rank has a sample"),
        (_of_no_sample_and_added_to_others, "RuntimeError: this batch has no sample.*leave out forward and backward"),
        (_the_same_and_ddp_wants_a_forward, "share samples so that no rank's last micro-batch is empty"),
        (_reduced_by_no_micro_batch, r"enter no_sync\(\) before state\.batch\(\).* has samples out of no_sync\(\)"),
        (_around_a_step_with_a_closure, r"enter state\.batch\(\) inside of it"),
        (_empty_in_eval_mode, r"under torch\.no_grad\(\), around state\.batch\(\)"),
        (_empty_where_ddp_looks_for_unused_parameters, f"find_unused_parameters{ANY_SAMPLE}"),
        (_empty_where_the_graph_is_static, f"static_graph{ANY_SAMPLE}"),
        (partial(_repeated_with, 0), LESS_THAN_TOLD),
        (partial(_repeated_with, 3), LESS_THAN_TOLD),
        (_unequal_after_detach, "RuntimeError: ranks have from 3 to 4 samples in this batch.* is not attached"),
        (_adds_up_to_unequal_after_detach, "ranks have from 4 to 8 samples"),
        (_loop_goes_on_after_detach, r"leave the loop before state\.detach\(\)"),
    ],
)
def test_what_is_refused(on_ranks, refused, message) -> None:
    for said in on_ranks(_error_of, 2, refused):
        assert re.search(message, said), said


def _with_the_switch(sampler_is_split: bool, equal: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_CROSSOVER", "off")
        ranks = Ranks()
        x, y = samples_of(0, torch.float64)
        try:
            if sampler_is_split:
                sampler = dx.BalancedSampler(24, 12)
                ranks.state.balance(sampler)
                for indices in ranks.state.batches(list(sampler)[0 if equal else ranks.rank :]):
                    ranks.optimizer.zero_grad()
                    ranks.backward(x[: len(indices)], y[: len(indices)])
                    ranks.optimizer.step()
            else:
                count = 3 if equal else 3 + ranks.rank
                ranks.backward(x[:count], y[:count])
        except RuntimeError as error:
            return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("sampler_is_split", "equal", "message"),
    [
        (False, True, "trained"),
        (False, False, "without DDP_CROSSOVER=off, or give all ranks equal batches"),
        (True, True, "trained"),
        (True, False, "some ranks have no batch left.*without DDP_CROSSOVER=off"),
    ],
)
def test_the_switch_trains_plain_ddp_where_that_is_right(on_ranks, sampler_is_split, equal, message) -> None:
    for said in on_ranks(_with_the_switch, 2, sampler_is_split, equal):
        assert re.search(message, said), said


class _Norms(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5))


def _synchronized_statistics() -> str:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Identity()))
    ddp.module[1] = nn.SyncBatchNorm(2)  # DDP itself refuses the layer on a CPU
    with pytest.raises(ValueError) as refused:
        dx.attach(ddp, sgd(ddp.parameters()), weighted=True)
    return str(refused.value)


def test_layers_that_add_up_losses_in_backward_are_refused(on_ranks) -> None:
    for said in on_ranks(_synchronized_statistics, 2):
        assert "1 (SyncBatchNorm)" in said
        assert "multiply each rank's mean loss by its samples * ranks / all samples" in said


class _WithoutHooks(torch.optim.Optimizer):
    """Wraps an optimizer, and skips `Optimizer.__init__`, on purpose."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside
        self.param_groups, self.state, self.defaults = inside.param_groups, inside.state, inside.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


def _unseen_steps() -> str:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    wrapper = _WithoutHooks(sgd(ddp.parameters()))
    with pytest.raises(TypeError) as refused:
        dx.attach(ddp, wrapper, weighted=True)
    dx.attach(ddp, wrapper.inside, weighted=True).detach()
    return str(refused.value)


def test_optimizers_whose_steps_nobody_sees_are_refused_but_not_the_one_inside(on_ranks) -> None:
    for said in on_ranks(_unseen_steps, 2):
        assert "_WithoutHooks" in said
        assert "attach the optimizer inside of it" in said


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
    run = WeightedRun(Weighted(plain), on_ranks=True)
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
