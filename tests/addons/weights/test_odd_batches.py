"""Weighted batches that are left, dropped, repeated or detached at odd moments, beside buffers and loaders: exact."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddp_crossover as dx
from harness import RankFailure
from heard import heard
from models import INPUTS, OUTPUTS, DeepNet
from weighted_loops import SAMPLES, Weighted, plain, samples_of, sgd, train_both
from weighted_ranks import STEPS, Ranks, mse, train_and_check, usual


def _dropped_inside_of_the_next_batch(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    if ranks.rank == 1:
        with ranks.model.no_sync(), ranks.state.batch(5):
            mse(ranks.model(x[:5]), y[:5]).backward()
    with ranks.state.batch(len(x)):
        ranks.optimizer.zero_grad()
        mse(ranks.model(x), y).backward()


def _never_differentiated(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    if ranks.rank == 1:
        with ranks.model.no_sync(), ranks.state.batch(5):
            mse(ranks.model(x[:5]), y[:5])
    ranks.backward(x, y)


def _second_micro_batch_has_no_backward(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    def forward() -> None:
        with ranks.model.no_sync(), ranks.state.batch(3):
            ranks.model(x[:3] * float("nan"))  # a loss that is not finite is skipped

    ranks.backward_by_halves(x, y, forward)


def _error_after_the_last_backward(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    first = 3 if ranks.rank == 0 else 1
    with contextlib.suppress(KeyError):
        with ranks.model.no_sync(), ranks.state.batch(first):
            (mse(ranks.model(x[:first]), y[:first]) * first / len(x)).backward()
        with ranks.state.batch(len(x) - first):
            (mse(ranks.model(x[first:]), y[first:]) * (1 - first / len(x))).backward()
            raise KeyError("metric")


def _error_after_the_backward_of_a_micro_batch(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    """Its samples count all the same."""
    cut = len(x) // 4
    with contextlib.suppress(KeyError), ranks.model.no_sync(), ranks.state.batch(cut):
        (mse(ranks.model(x[:cut]), y[:cut]) * cut / len(x)).backward()
        raise KeyError("metric")
    with ranks.state.batch(len(x) - cut):
        (mse(ranks.model(x[cut:]), y[cut:]) * (1 - cut / len(x))).backward()


def _empty_micro_batches(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    def empty() -> None:
        with ranks.model.no_sync(), ranks.state.batch(0):
            (ranks.model(torch.ones_like(samples_of(0, torch.float64)[0])) * float("nan")).sum().backward()

    empty()
    ranks.backward_by_halves(x, y, empty)


def _loop_over_micro_batches_without_samples(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    """One rank has all samples, and the other goes through the same loop."""
    x, y = samples_of(ranks.number, torch.float64)
    half, has_samples = len(x) // 2, ranks.rank == ranks.number % 2
    with ranks.state.batch(len(x) if has_samples else 0):
        for low, high in ((0, half), (half, len(x))):
            with ranks.run.no_sync(is_last=high == len(x)):
                if has_samples:
                    (mse(ranks.model(x[low:high]), y[low:high]) / 2).backward()


def _fail(ranks: Ranks, x: Tensor) -> None:
    with contextlib.suppress(KeyError), ranks.state.batch(len(x)):
        ranks.model(x * float("inf"))
        raise KeyError("out of memory")


def _repeated_after_an_error(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    """By all ranks, or by one."""
    if ranks.number % 2 or ranks.rank == 1:
        _fail(ranks, x)
    ranks.backward(x, y)


def _last_micro_batch_repeated_after_an_error(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    half = len(x) // 2
    if ranks.number % 2 or ranks.rank == 1:
        ranks.backward_by_halves(x, y, lambda: _fail(ranks, x[half:]) if ranks.rank == 1 else None)
    else:
        ranks.backward(x, y)


def _evaluated_between_steps(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    ranks.backward(x, y)
    with torch.no_grad():
        for batch in ranks.state.batches([x, x] if ranks.rank else [x]):
            with ranks.state.batch(0 if batch is None else len(batch)):
                if batch is not None:
                    ranks.model(batch)


def _empty_after_lightning_has_validated(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    """Lightning puts DDP into eval mode, and then only the module in it back into training mode."""
    ranks.model.eval()
    with torch.no_grad():
        ranks.model(x)
    ranks.model.module.train()
    x, y = samples_of(ranks.number, torch.float64)
    has_samples = ranks.rank == ranks.number % 2
    with ranks.state.batch(len(x) if has_samples else 0):
        if has_samples:
            mse(ranks.model(x), y).backward()


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(_dropped_inside_of_the_next_batch, marks=pytest.mark.quick),
        _never_differentiated,
        _second_micro_batch_has_no_backward,
        _error_after_the_last_backward,
        _error_after_the_backward_of_a_micro_batch,
        _empty_micro_batches,
        _loop_over_micro_batches_without_samples,
        _repeated_after_an_error,
        _last_micro_batch_repeated_after_an_error,
        _evaluated_between_steps,
        _empty_after_lightning_has_validated,
    ],
    ids=lambda train: train.__name__.strip("_"),
)
def test_samples_count_if_their_gradients_are_sent(on_ranks, train) -> None:
    on_ranks(train_and_check, 2, train)


def _skip_a_backward() -> list[str]:
    ranks = Ranks()
    with heard() as said:
        for number in range(STEPS):
            if number < 2:
                x, _ = samples_of(number, torch.float64)
                with ranks.state.batch(4):
                    ranks.model(x[:4])
            ranks.step(number, usual)
    ranks.check()
    ranks.state.detach()
    return [line for line in said if "a forward without a backward" in line]


def test_a_backward_that_all_ranks_skip_is_named_once(on_ranks) -> None:
    for said in on_ranks(_skip_a_backward, 2):
        assert len(said) == 1
        assert "multiply its loss by 0 instead" in said[0]


def _detach_before_the_backward(dear: dict[str, Any]) -> None:
    ranks = Ranks(**dear)

    def leave(ranks: Ranks, x: Tensor, y: Tensor) -> None:
        with ranks.state.batch(len(x)):
            loss = mse(ranks.model(x), y)
            ranks.state.detach()
            loss.backward()

    for number in range(STEPS):
        ranks.step(number, usual)
    ranks.step(STEPS, leave, sizes=(9, 3))
    for number in range(STEPS + 1, STEPS + 3):
        ranks.step(number, usual, sizes=(6, 6))
    ranks.check()


@pytest.mark.parametrize("dear", [{}, {"schedule": "allreduce"}], ids=["pipeline", "plain"])
def test_a_batch_that_is_under_way_at_detach_keeps_its_weight_and_later_ones_are_equal(on_ranks, dear) -> None:
    on_ranks(_detach_before_the_backward, 2, dear)


class _Normalized(nn.Sequential):
    """Has buffers that DDP broadcasts in each forward, and whose values change nothing in training."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.Linear(6, OUTPUTS))


class _Scaled(DeepNet):
    """Has a buffer that forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.quick
@pytest.mark.parametrize(
    "case",
    [Weighted(plain, model=_Normalized, split="one"), Weighted(plain, model=_Scaled, split="zeros")],
    ids=["batch norm", "a buffer"],
)
def test_a_rank_without_samples_takes_part_in_a_model_with_buffers(on_ranks, case) -> None:
    on_ranks(train_both, 3, case)


def _two_forwards_and_then_no_data(model: type[nn.Module]) -> None:
    ddp = DistributedDataParallel(model())
    optimizer = sgd(ddp.parameters())
    state = dx.attach(ddp, optimizer, weighted=True, fusion_mb=1e-4)
    x, y = torch.ones(3, INPUTS), torch.ones(3, OUTPUTS)
    for step in range(6):
        has_data = step < 5 or dist.get_rank() == 0
        optimizer.zero_grad()
        with state.batch(3 if has_data else 0):
            if has_data:
                (mse(ddp(x), y) + mse(ddp(2 * x), y)).backward()
        optimizer.step()


def test_a_rank_without_samples_of_several_forwards_gets_an_error_where_each_broadcasts(on_ranks) -> None:
    on_ranks(_two_forwards_and_then_no_data, 2, DeepNet)
    with pytest.raises(RankFailure, match=r"of which the last step had 2, .* with any sample in it"):
        on_ranks(_two_forwards_and_then_no_data, 2, _Scaled)


def _places_in_the_epoch() -> list[tuple[int, int]]:
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
    loader = iter(DataLoader(data, batch_sampler=sampler, num_workers=2))  # which has drawn more than was trained on
    place()
    for (indices,) in loader:
        x, y = samples_of(len(places), torch.float64)
        ranks.optimizer.zero_grad()
        ranks.backward(x[: len(indices)], y[: len(indices)])
        ranks.optimizer.step()
        place()
    ranks.state.detach()
    return places


def test_a_balanced_sampler_counts_steps_that_were_trained(on_ranks) -> None:
    expected = [(1, 0), *((1, batch) for batch in range(8)), (2, 0)]
    assert on_ranks(_places_in_the_epoch, 2) == [expected, expected]


def _places(kind: str) -> list[Any]:
    ranks = Ranks()
    sampler = dx.BalancedSampler(8 * SAMPLES, SAMPLES)
    ranks.state.balance(sampler)
    places = []
    for number, indices in enumerate(sampler):
        x, y = samples_of(number, torch.float64)
        x, y = x[: len(indices)], y[: len(indices)]
        is_step = kind != "accumulated" or number % 4 == 3
        with contextlib.nullcontext() if is_step else ranks.model.no_sync(), ranks.state.batch(len(x)):
            loss = mse(ranks.model(x), y)
            if kind != "skipped" or number % 3:
                loss.backward()
        if is_step:
            places.append(sampler.state_dict()["batch"])
            ranks.optimizer.step()
            ranks.optimizer.zero_grad()
    ranks.state.detach()
    return places


@pytest.mark.parametrize(("kind", "places"), [("accumulated", [4, 0]), ("skipped", [1, 2, 3, 4, 5, 6, 7, 0])])
def test_a_balanced_sampler_knows_what_was_trained_on(on_ranks, kind, places) -> None:
    assert on_ranks(_places, 2, kind) == [places, places]
