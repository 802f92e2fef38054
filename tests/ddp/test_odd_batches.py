"""Loops over weighted batches that are left, dropped, detached or resumed at odd moments: exact, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp_crossover as dx
from heard import heard
from weighted_loops import SAMPLES, Weighted, WeightedRun, plain, samples_of

STEPS = 10
mse = nn.functional.mse_loss


class Ranks:
    """Two ranks with 4 and 8 samples of each step, and the same training in one process."""

    def __init__(self, **dear: Any) -> None:
        self.run = WeightedRun(Weighted(plain, dear=dear), on_ranks=True)
        self.alone = WeightedRun(Weighted(plain), on_ranks=False)
        self.state, self.model, self.optimizer = self.run.state, self.run.model, self.run.optimizer

    def step(
        self, number: int, train: Callable[[torch.Tensor, torch.Tensor], None], sizes: tuple[int, int] = (4, 8)
    ) -> None:
        """`train(x, y)` goes forward and backward with this rank's samples."""
        x, y = samples_of(number, torch.float64)
        for optimizer in (self.optimizer, self.alone.optimizer):
            optimizer.zero_grad()
        mse(self.alone.model(x), y).backward()
        low = 0 if self.run.rank == 0 else SAMPLES - sizes[1]
        high = sizes[0] if self.run.rank == 0 else SAMPLES
        train(x[low:high], y[low:high])
        self.optimizer.step()
        self.alone.optimizer.step()

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        with self.state.batch(len(x)):
            mse(self.model(x), y).backward()

    def backward_by_halves(self, x: torch.Tensor, y: torch.Tensor, between: Callable[[], None] | None = None) -> None:
        """The same in two micro-batches, of which the first is under ``no_sync()``."""
        half = len(x) // 2
        with self.model.no_sync(), self.state.batch(half):
            (mse(self.model(x[:half]), y[:half]) / 2).backward()
        if between is not None:
            between()
        with self.state.batch(half):
            (mse(self.model(x[half:]), y[half:]) / 2).backward()

    def train(self, train: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """All steps, after which the parameters must be those of one process."""
        for number in range(STEPS):
            self.step(number, train)
        self.check()
        self.state.detach()

    def check(self) -> None:
        for ours, other in zip(self.run.net.parameters(), self.alone.net.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), other.detach(), rtol=1e-12, atol=1e-12)


def _micro_batch_is_dropped(how: str) -> None:
    ranks = Ranks()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        if ranks.run.rank == 1:
            with ranks.model.no_sync(), ranks.state.batch(5):
                loss = mse(ranks.model(x[:5]), y[:5])
                if how == "zero_grad":
                    loss.backward()
            ranks.optimizer.zero_grad()
        ranks.backward(x, y)

    ranks.train(train)


@pytest.mark.quick
@pytest.mark.parametrize("how", ["zero_grad", "no backward"])
def test_samples_whose_gradients_were_dropped_do_not_count(on_ranks, how) -> None:
    on_ranks(_micro_batch_is_dropped, 2, how)


def _second_micro_batch_has_no_backward() -> None:
    ranks = Ranks()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        def forward() -> None:
            with ranks.model.no_sync(), ranks.state.batch(3):
                ranks.model(x[:3] * float("nan"))  # a loss that is not finite is skipped

        ranks.backward_by_halves(x, y, forward)

    ranks.train(train)


def test_a_micro_batch_without_a_backward_does_not_count(on_ranks) -> None:
    on_ranks(_second_micro_batch_has_no_backward, 2)


def _raise_after_the_backward() -> None:
    ranks = Ranks()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        first = 3 if ranks.run.rank == 0 else 1
        with contextlib.suppress(KeyError):
            with ranks.model.no_sync(), ranks.state.batch(first):
                (mse(ranks.model(x[:first]), y[:first]) * first / len(x)).backward()
            with ranks.state.batch(len(x) - first):
                (mse(ranks.model(x[first:]), y[first:]) * (1 - first / len(x))).backward()
                raise KeyError("metric")

    ranks.train(train)


def test_an_error_after_the_backward_changes_no_later_weight(on_ranks) -> None:
    on_ranks(_raise_after_the_backward, 2)


def _detach_before_the_backward(dear: dict[str, Any]) -> None:
    ranks = Ranks(**dear)

    def leave(x: torch.Tensor, y: torch.Tensor) -> None:
        with ranks.state.batch(len(x)):
            loss = mse(ranks.model(x), y)
            ranks.state.detach()
            loss.backward()

    for number in range(STEPS):
        ranks.step(number, ranks.backward)
    ranks.step(STEPS, leave, sizes=(9, 3))
    for number in range(STEPS + 1, STEPS + 3):
        ranks.step(number, ranks.backward, sizes=(6, 6))
    ranks.check()


@pytest.mark.parametrize("dear", [{}, {"schedule": "allreduce"}], ids=["pipeline", "plain"])
def test_a_batch_that_is_under_way_at_detach_keeps_its_weight_and_later_ones_are_equal(on_ranks, dear) -> None:
    on_ranks(_detach_before_the_backward, 2, dear)


def _detach_between_micro_batches() -> str:
    ranks = Ranks()
    x, y = samples_of(0, torch.float64)
    first = 2 if ranks.run.rank == 0 else 6
    with ranks.model.no_sync(), ranks.state.batch(first):
        mse(ranks.model(x[:first]), y[:first]).backward()
    ranks.state.detach()
    try:
        ranks.backward(x[:2], y[:2])
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_what_adds_up_to_unequal_sizes_after_detach_is_refused(on_ranks) -> None:
    assert all("ranks have from 4 to 8 samples" in said for said in on_ranks(_detach_between_micro_batches, 2))


def _empty_micro_batches() -> None:
    ranks = Ranks()

    def empty() -> None:
        with ranks.model.no_sync(), ranks.state.batch(0):
            (ranks.model(torch.ones_like(samples_of(0, torch.float64)[0])) * float("nan")).sum().backward()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        empty()
        ranks.backward_by_halves(x, y, empty)

    ranks.train(train)


def test_micro_batches_without_samples_count_for_nothing(on_ranks) -> None:
    on_ranks(_empty_micro_batches, 2)


def _empty_last_micro_batch() -> None:
    ranks = Ranks()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        if ranks.run.rank == 1:
            ranks.backward_by_halves(x, y)
            return
        with ranks.model.no_sync():
            ranks.backward(x, y)
        with ranks.state.batch(0):
            pass

    ranks.train(train)


def test_what_earlier_micro_batches_have_added_counts_if_the_last_one_is_empty(on_ranks) -> None:
    on_ranks(_empty_last_micro_batch, 2)


def _repeat_a_batch_that_has_raised(is_micro: bool) -> None:
    ranks = Ranks()

    def fail(x: torch.Tensor) -> None:
        with ranks.state.batch(len(x)):
            ranks.model(x * float("inf"))
            raise KeyError("out of memory")

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        half = len(x) // 2
        if not is_micro:
            with contextlib.suppress(KeyError):
                fail(x)
            ranks.backward(x, y)
            return

        def between() -> None:
            if ranks.run.rank == 1:
                with contextlib.suppress(KeyError):
                    fail(x[half:])

        ranks.backward_by_halves(x, y, between)

    def on_rank_1(x: torch.Tensor, y: torch.Tensor) -> None:
        if ranks.run.rank == 1:
            train(x, y)
        else:
            ranks.backward(x, y)

    for number in range(STEPS):
        ranks.step(number, train if number % 2 else on_rank_1)
    ranks.check()
    ranks.state.detach()


@pytest.mark.parametrize("is_micro", [False, True], ids=["whole batch", "last micro-batch"])
def test_a_rank_may_repeat_a_batch_that_has_raised_before_its_backward(on_ranks, is_micro) -> None:
    on_ranks(_repeat_a_batch_that_has_raised, 2, is_micro)


def _repeat_it_with_fewer_samples(count: int) -> str:
    ranks = Ranks()
    x, y = samples_of(0, torch.float64)
    with contextlib.suppress(KeyError), ranks.state.batch(4):
        ranks.model(x[:4])
        raise KeyError("out of memory")
    try:
        if count:
            ranks.backward(x[:count], y[:count])
        else:
            with ranks.state.batch(0):
                pass
    except RuntimeError as error:
        return str(error)
    finally:
        ranks.backward(x[:4], y[:4])
        ranks.state.detach()
    return "nothing"


@pytest.mark.parametrize("count", [0, 3])
def test_another_number_of_samples_than_others_know_of_is_refused(on_ranks, count) -> None:
    for said in on_ranks(_repeat_it_with_fewer_samples, 2, count):
        assert "the others knew of its 4 samples" in said
        assert "multiply the loss by 0" in said


def _last_micro_batch_is_empty() -> str:
    ranks = Ranks()
    x, y = samples_of(0, torch.float64)
    try:
        with ranks.state.batch(4), ranks.model.no_sync():
            mse(ranks.model(x[:4]), y[:4]).backward()
            # A last micro-batch, outside of no_sync(), would be here, but nothing is left for it.
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_an_empty_last_micro_batch_is_refused(on_ranks) -> None:
    for said in on_ranks(_last_micro_batch_is_empty, 2):
        assert "leave the last micro-batch that has samples out of no_sync()" in said


def _skip_a_backward() -> list[str]:
    ranks = Ranks()

    def skip(x: torch.Tensor, y: torch.Tensor) -> None:
        with ranks.state.batch(len(x)):
            ranks.model(x)

    with heard() as said:
        for number in (0, 1):
            x, y = samples_of(number, torch.float64)
            skip(x, y)
        ranks.train(ranks.backward)
    return [line for line in said if "a forward without a backward" in line]


def test_a_skipped_backward_is_named_once(on_ranks) -> None:
    for said in on_ranks(_skip_a_backward, 2):
        assert len(said) == 1
        assert "multiply its loss by 0 instead" in said[0]


def _places_in_the_epoch(workers: int) -> list[tuple[int, int]]:
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it has no workers
    ranks = Ranks()
    data = TensorDataset(torch.arange(96))
    sampler = dx.BalancedSampler(data, SAMPLES)
    ranks.state.balance(sampler)
    sampler.set_epoch(1)
    places = []

    def place() -> None:
        state = sampler.state_dict()
        places.append((state["epoch"], state["batch"]))

    place()
    loader = iter(DataLoader(data, batch_sampler=sampler, num_workers=workers))
    place()
    for (indices,) in loader:
        x, y = samples_of(len(places), torch.float64)
        x, y, half = x[: len(indices)], y[: len(indices)], len(indices) // 2
        ranks.optimizer.zero_grad()
        with ranks.model.no_sync(), ranks.state.batch(half):
            mse(ranks.model(x[:half]), y[:half]).backward()
        with ranks.state.batch(len(x) - half):
            mse(ranks.model(x[half:]), y[half:]).backward()
        ranks.optimizer.step()
        place()
    ranks.state.detach()
    return places


@pytest.mark.parametrize("workers", [0, 2])
def test_a_balanced_sampler_counts_steps_that_were_trained(on_ranks, workers) -> None:
    expected = [(1, 0), *((1, batch) for batch in range(8)), (2, 0)]
    assert on_ranks(_places_in_the_epoch, 2, workers) == [expected, expected]


def _batch_around_a_step_with_a_closure() -> str:
    ranks = Ranks()
    x, y = samples_of(0, torch.float64)

    def closure() -> torch.Tensor:
        ranks.optimizer.zero_grad()
        loss = mse(ranks.model(x[:4]), y[:4])
        loss.backward()
        return loss

    try:
        for _ in range(STEPS):
            with ranks.state.batch(4):
                ranks.optimizer.step(closure)
    except RuntimeError as error:
        return str(error)
    finally:
        ranks.state.detach()
    return "nothing"


def test_a_batch_around_a_step_with_a_closure(on_ranks) -> None:
    for said in on_ranks(_batch_around_a_step_with_a_closure, 2):
        assert "enter state.batch() inside of it" in said
