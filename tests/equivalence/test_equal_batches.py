"""With ``weighted=True`` and equal batches, training has the bits of plain DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from equivalence import ADAMW, SGD, Case, Run, check_case
from models import BatchNormNet, DeepNet, OddNet

SAMPLES = 3


def _batch(run: Run) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if run.state is None else run.state.batch(SAMPLES)


def one_forward(run: Run) -> Iterator[Any]:
    """One forward in each batch."""
    for x, y in run.batches():
        run.optimizer.zero_grad()
        with _batch(run):
            loss = run.loss(run.model(x), y)
            loss.backward()
        run.optimizer.step()
        yield loss


def accumulation(run: Run) -> Iterator[Any]:
    """Three micro-batches, two of them under ``no_sync()``, in batches of their own."""
    for index, (x, y) in enumerate(run.batches(per_step=3)):
        is_last = index % 3 == 2
        with contextlib.nullcontext() if is_last else run.model.no_sync(), _batch(run):
            loss = run.loss(run.model(x), y) / 3
            loss.backward()
        if is_last:
            run.optimizer.step()
            run.optimizer.zero_grad()
        yield loss


def two_backwards(run: Run) -> Iterator[Any]:
    """Both of them are reduced, so the first one's sum is averaged again."""
    for x, y in run.batches():
        run.optimizer.zero_grad()
        with _batch(run):
            for sign in (1, -2):
                loss = run.loss(run.model(sign * x), y)
                loss.backward()
        run.optimizer.step()
        yield loss


# Each loop with each model and on each number of ranks.
@pytest.mark.parametrize(
    ("loop", "model", "world_size"),
    [
        (loop, model, 2 + (row + column) % 3)
        for row, loop in enumerate([one_forward, accumulation, two_backwards])
        for column, model in enumerate([OddNet, DeepNet, BatchNormNet])
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_equal_counts_have_the_bits_of_plain_ddp(on_ranks, loop, model, world_size) -> None:
    case = Case(loop, model=model, optimizer=SGD, world_size=world_size, dear={"weighted": True})
    check_case(case, on_ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("schedule", ["auto", "dear"])
def test_so_they_have_in_other_dtypes(on_ranks, dtype, schedule) -> None:
    wire = {"wire_dtype": dtype} if dtype is torch.bfloat16 else {}
    case = Case(one_forward, model=DeepNet, optimizer=ADAMW, dear={"weighted": True, "schedule": schedule} | wire)
    check_case(case, on_ranks)
