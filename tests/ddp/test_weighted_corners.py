"""Weighted batches beside buffers, evaluations, errors and loaders, as scripts have them: exact, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_odd_batches import Ranks, mse
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from harness import RankFailure
from models import INPUTS, OUTPUTS, DeepNet
from weighted_loops import SAMPLES, Weighted, WeightedRun, plain, samples_of, sgd, train_both


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
    [
        Weighted(plain, model=_Normalized, split="one"),
        Weighted(plain, model=_Scaled, split="zeros"),
    ],
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


def _synchronized_statistics() -> str:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(_Normalized())
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Identity()))
    ddp.module[1] = model[1]  # DDP itself refuses the layer on a CPU
    try:
        dx.attach(ddp, sgd(ddp.parameters()), weighted=True)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_layers_that_add_up_losses_in_backward_are_refused(on_ranks) -> None:
    for said in on_ranks(_synchronized_statistics, 2):
        assert "module.1 (SyncBatchNorm)" in said or "1 (SyncBatchNorm)" in said
        assert "multiply each rank's mean loss by its samples * ranks / all samples" in said


def _evaluate_between_steps() -> None:
    ranks = Ranks()

    def train(x: Tensor, y: Tensor) -> None:
        ranks.backward(x, y)
        with torch.no_grad():
            batches = [x, x] if ranks.run.rank else [x]
            for batch in ranks.state.batches(batches):
                with ranks.state.batch(0 if batch is None else len(batch)):
                    if batch is not None:
                        ranks.model(batch)

    ranks.train(train)


def test_an_evaluation_is_no_step(on_ranks) -> None:
    on_ranks(_evaluate_between_steps, 2)


def _empty_batch_in_eval_mode() -> str:
    ranks = Ranks()
    ranks.model.eval()
    try:
        with ranks.state.batch(0):
            pass
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_an_empty_batch_of_a_model_in_eval_mode_is_refused(on_ranks) -> None:
    assert all("under torch.no_grad(), around state.batch()" in said for said in on_ranks(_empty_batch_in_eval_mode, 2))


def _train_after_a_lost_micro_batch(lose: Callable[[Ranks, Tensor, Tensor], None]) -> None:
    ranks = Ranks()

    def train(x: Tensor, y: Tensor) -> None:
        if ranks.run.rank == 1:
            lose(ranks, x[:5], y[:5])
        ranks.backward(x, y)

    ranks.train(train)


def _zeroed(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    with ranks.model.no_sync(), ranks.state.batch(len(x)):
        mse(ranks.model(x), y).backward()
    ranks.optimizer.zero_grad(set_to_none=False)


def _zeroed_by_hand(ranks: Ranks, x: Tensor, y: Tensor) -> None:
    with ranks.model.no_sync(), ranks.state.batch(len(x)):
        mse(ranks.model(x), y).backward()
    for parameter in ranks.model.parameters():
        parameter.grad.zero_()


@pytest.mark.parametrize("lose", [_zeroed, _zeroed_by_hand])
def test_samples_whose_gradients_were_zeroed_do_not_count(on_ranks, lose) -> None:
    on_ranks(_train_after_a_lost_micro_batch, 2, lose)


def _zeroed_inside_of_the_next_batch() -> None:
    ranks = Ranks()

    def train(x: Tensor, y: Tensor) -> None:
        if ranks.run.rank == 1:
            with ranks.model.no_sync(), ranks.state.batch(5):
                mse(ranks.model(x[:5]), y[:5]).backward()
        with ranks.state.batch(len(x)):
            ranks.optimizer.zero_grad()
            mse(ranks.model(x), y).backward()

    ranks.train(train)


def test_they_may_be_dropped_inside_of_the_next_batch(on_ranks) -> None:
    on_ranks(_zeroed_inside_of_the_next_batch, 2)


def _error_after_a_micro_batch() -> None:
    ranks = Ranks()

    def train(x: Tensor, y: Tensor) -> None:
        cut = len(x) // 4
        with contextlib.suppress(KeyError), ranks.model.no_sync(), ranks.state.batch(cut):
            (mse(ranks.model(x[:cut]), y[:cut]) * cut / len(x)).backward()
            raise KeyError("metric")
        with ranks.state.batch(len(x) - cut):
            (mse(ranks.model(x[cut:]), y[cut:]) * (1 - cut / len(x))).backward()

    ranks.train(train)


def test_an_error_after_the_backward_of_a_micro_batch_leaves_its_samples_counted(on_ranks) -> None:
    on_ranks(_error_after_a_micro_batch, 2)


def _empty_last_micro_batch_that_ddp_wants() -> str:
    run = WeightedRun(Weighted(plain, ddp={"find_unused_parameters": True}), on_ranks=True)
    x, y = samples_of(0, torch.float64)
    with run.model.no_sync(), run.state.batch(4):
        mse(run.model(x[:4]), y[:4]).backward()
    try:
        with run.state.batch(0):
            (mse(run.model(x[:1]), y[:1]) * 0).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_an_empty_last_micro_batch_has_a_way_out_that_ddp_takes(on_ranks) -> None:
    for said in on_ranks(_empty_last_micro_batch_that_ddp_wants, 2):
        assert "share samples so that no rank's last micro-batch is empty" in said


def _failing(count: int) -> Iterator[int]:
    yield from range(count)
    raise OSError("disk")


def _train_until_the_loader_fails() -> tuple[int, str]:
    ranks = Ranks()
    done = 0
    try:
        for number in ranks.state.batches(_failing(2)):
            ranks.step(number, ranks.backward)
            done += 1
    except OSError as error:
        return done, str(error)
    return done, "nothing"


def test_batches_before_one_that_cannot_be_loaded_are_trained_on(on_ranks) -> None:
    assert on_ranks(_train_until_the_loader_fails, 2) == [(2, "disk")] * 2


def _detach_in_the_loop() -> str:
    ranks = Ranks()
    try:
        for number in ranks.state.batches(range(4)):
            ranks.step(number, ranks.backward, sizes=(6, 6))
            if number == 1:
                ranks.state.detach()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_loop_over_batches_that_goes_on_after_detach_is_refused(on_ranks) -> None:
    assert all("leave the loop before state.detach()" in said for said in on_ranks(_detach_in_the_loop, 2))


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


@pytest.mark.parametrize(
    ("kind", "places"),
    [("accumulated", [4, 0]), ("skipped", [1, 2, 3, 4, 5, 6, 7, 0]), ("all", [1, 2, 3, 4, 5, 6, 7, 0])],
)
def test_a_balanced_sampler_knows_what_was_trained_on(on_ranks, kind, places) -> None:
    assert on_ranks(_places, 2, kind) == [places, places]


def _scales_without_data(of: str, norms: str, clips: bool) -> list[Any]:
    torch.manual_seed(0)
    net = DeepNet()
    ddp = DistributedDataParallel(net)
    optimizer = sgd(net.parameters())
    state = dx.attach(ddp, optimizer, weighted=True, norms=norms, fusion_mb=1e-4)
    scaler = {"own": dx.GradScaler, "stock": torch.amp.GradScaler}[of]("cpu", init_scale=2.0**10, growth_interval=2)
    rank, scales = torch.distributed.get_rank(), []
    for step in range(8):
        samples = 0 if step < 2 and rank == 0 else 3
        optimizer.zero_grad()
        with state.batch(samples):
            if samples:
                x = torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(10 * step + rank))
                loss = ddp(x).square().mean() * (float("inf") if step in (1, 4) and rank == 1 else 1.0)
                scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [scales, *(parameter.tolist() for parameter in net.parameters())]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("norms", ["exact", "sharded"])
@pytest.mark.parametrize("of", ["own", "stock"])
def test_a_rank_without_samples_at_first_scales_losses_as_the_others_do(on_ranks, of, norms, clips) -> None:
    one, other = on_ranks(_scales_without_data, 2, of, norms, clips)
    assert one == other
    assert one[0] == [1024.0, 512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0]
