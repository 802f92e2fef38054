"""The weight of a rank counts the samples whose gradients it sends, whatever has become of gradients in between.

The gradient of the models here is the number of samples that it is made of, so that a wrong count shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from equivalence import SMALL_GROUPS_MB

STEPS = 9
SIZES = ([3, 1], [1, 4])  # of the micro-batches, on two ranks


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(300, dtype=torch.float64)) for _ in range(2))
        self.raises = False

    def forward(self, samples: int) -> Tensor:
        if self.raises:
            raise KeyError("forward")
        return (self.first.sum() + self.second.sum()) * samples


class Script:
    """A training script; `of_rank` is this rank's entry."""

    def __init__(self, *, view: bool = False, **options: Any) -> None:
        self.net = _Counting()
        self.model = DistributedDataParallel(self.net, gradient_as_bucket_view=view)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)
        self.state = dx.attach(self.model, self.optimizer, weighted=True, fusion_mb=SMALL_GROUPS_MB, **options)
        self.rank = dist.get_rank()

    def batch(self, sizes: list[int], *, is_last: bool = True) -> None:
        with contextlib.nullcontext() if is_last else self.model.no_sync(), self.state.batch(sizes[self.rank]):
            self.model(sizes[self.rank]).backward()

    @contextlib.contextmanager
    def failing(self) -> Any:
        with contextlib.suppress(KeyError):
            yield
        self.net.raises = False

    def check(self, *batches: list[int]) -> None:
        """The gradient is that of these batches, of all ranks, each weighted by its number of samples."""
        of_ranks = [sum(sizes) for sizes in zip(*batches, strict=True)]
        expected = sum(samples**2 for samples in of_ranks) / sum(of_ranks)
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, expected), rtol=1e-12, atol=1e-12)
        self.optimizer.step()


def to_none(script: Script) -> None:
    script.optimizer.zero_grad()


def to_zeros(script: Script) -> None:
    script.optimizer.zero_grad(set_to_none=False)


def by_hand(script: Script) -> None:
    for parameter in script.net.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def through_data(script: Script) -> None:
    for parameter in script.net.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(0)


def replaced(script: Script) -> None:
    for parameter in script.net.parameters():
        parameter.grad = torch.zeros_like(parameter)


ZERO = [to_none, to_zeros, by_hand, through_data, replaced]
OPTIONS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"view": True},
    "sharded": {"shard_optimizer": True},
    "norms": {"norms": "sharded"},
    "bfloat16": {"wire_dtype": torch.bfloat16},
}


def _micro_batches(zero: Callable[[Script], None], options: dict[str, Any]) -> None:
    script = Script(**options)
    for step in range(STEPS):
        zero(script)
        script.batch(SIZES[0], is_last=False)
        if step % 3 == 2:  # lost, and begun again
            zero(script)
            script.batch(SIZES[1], is_last=False)
            script.batch(SIZES[0])
        else:
            script.batch(SIZES[1])
        if options.get("wire_dtype") is None:
            script.check(*SIZES)
        else:
            [value] = set(script.net.first.grad.tolist())  # type: ignore[union-attr]
            assert abs(value - 41 / 9) < 0.03
            script.optimizer.step()
    script.state.detach()


@pytest.mark.quick
@pytest.mark.parametrize("zero", ZERO, ids=lambda one: one.__name__)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_micro_batches_count_however_gradients_are_zeroed(on_ranks, zero, options) -> None:
    on_ranks(_micro_batches, 2, zero, options)


def _fails_in_a_micro_batch(zero: Callable[[Script], None], has_forward: bool) -> None:
    """Gradients are zeroed inside of a batch that raises, or has no backward, and is repeated."""
    script = Script()
    for _ in range(STEPS):
        with script.failing(), script.model.no_sync(), script.state.batch(SIZES[0][script.rank]):
            zero(script)
            script.net.raises = not has_forward
            script.model(1)
        script.batch(SIZES[0], is_last=False)
        script.batch(SIZES[1])
        script.check(*SIZES)
    script.state.detach()


@pytest.mark.parametrize("has_forward", [False, True], ids=["raises", "no backward"])
@pytest.mark.parametrize("zero", [to_none, to_zeros], ids=lambda one: one.__name__)
def test_a_repeated_micro_batch_counts_once(on_ranks, zero, has_forward) -> None:
    on_ranks(_fails_in_a_micro_batch, 2, zero, has_forward)


def _fails_in_its_last_forward(is_zeroed: bool) -> str:
    """The first half of a batch is in `.grad`, and the forward of the other, which would be reduced, raises."""
    script = Script()
    for step in range(STEPS):
        to_none(script)
        if step == 6:
            with script.failing(), script.state.batch(4):
                with script.model.no_sync():
                    script.model(2).backward()
                script.net.raises = True
                script.model(2)
            if is_zeroed:
                to_zeros(script)
            try:
                script.batch([2, 2], is_last=False)
            except RuntimeError as error:
                return str(error)
            script.batch([2, 2])
            script.check([4, 4])
        else:
            script.batch([4, 4])
            script.check([4, 4])
    script.state.detach()
    return "trained"


@pytest.mark.parametrize(("is_zeroed", "said"), [(False, "call optimizer.zero_grad() before"), (True, "trained")])
def test_a_part_of_a_batch_is_never_weighted(on_ranks, is_zeroed, said) -> None:
    for result in on_ranks(_fails_in_its_last_forward, 2, is_zeroed):
        assert said in result


def _zeroed_before_backward(is_last: bool) -> str:
    script = Script()
    for _ in range(STEPS):
        to_none(script)
        script.batch(SIZES[0], is_last=False)
        with contextlib.nullcontext() if is_last else script.model.no_sync(), script.state.batch(3):
            output = script.model(3)
            to_zeros(script)
            try:
                output.backward()
            except RuntimeError as error:
                return str(error)
        script.batch(SIZES[1])
        script.check([3, 3], SIZES[1])
    script.state.detach()
    return "trained"


@pytest.mark.parametrize(
    ("is_last", "said"), [(True, "call optimizer.zero_grad() before the forward"), (False, "trained")]
)
def test_gradients_zeroed_between_forward_and_backward(on_ranks, is_last, said) -> None:
    for result in on_ranks(_zeroed_before_backward, 2, is_last):
        assert said in result


def _loss_of_zero() -> None:
    """A micro-batch whose gradients are zero, because its loss is multiplied by zero, counts all the same."""
    script = Script()
    for _ in range(STEPS):
        to_zeros(script)
        with script.model.no_sync(), script.state.batch(4):
            (script.model(4) * 0).backward()
        script.batch(SIZES[1])
        expected = sum((4 + samples) * samples for samples in SIZES[1]) / (8 + sum(SIZES[1]))
        for parameter in script.net.parameters():
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, expected), rtol=1e-12, atol=1e-12)
        script.optimizer.step()
    script.state.detach()


def test_gradients_of_zero_count(on_ranks) -> None:
    on_ranks(_loss_of_zero, 2)


def _empty_micro_batches() -> None:
    """A rank without samples goes through all micro-batches of the others with any sample."""
    script = Script()
    for _ in range(STEPS):
        to_none(script)
        with script.state.batch(0 if script.rank == 0 else 5):
            with script.model.no_sync():
                script.model(2).backward()
            script.model(3).backward()
        script.check([0, 5])
    script.state.detach()


def test_micro_batches_without_samples_leave_reduced_gradients_alone(on_ranks) -> None:
    on_ranks(_empty_micro_batches, 2)
