"""Attach, and train, under a default device on which nothing has values: what we make for ourselves is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from equivalence import ADAMW, SGD, Case, Run, check_case, optimizer, plain_loop, train_step
from own_optimizers import OwnOptimizer


class CountsOnTheDefaultDevice(OwnOptimizer):
    """Counts the updates of each parameter in a tensor that names no device, as torch's Adam does up to 2.11."""

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            self.state[p]["updates"] = updates = self.state[p].get("updates", torch.zeros(())) + 1
            p.add_(p.grad, alpha=-group["lr"] / updates.item())


def _attached_there(run: Run) -> Iterator[Any]:
    with torch.device("meta"):
        run.attach()
    yield from plain_loop(run)


def _trained_there(run: Run) -> Iterator[Any]:
    batches = [run.batch(index) for index in range(run.case.steps)]  # made where the model is
    with torch.device("meta"):
        run.attach()
        for x, y in batches:
            yield train_step(run, x, y)


@pytest.mark.parametrize(
    ("loop", "factory"),
    [
        pytest.param(_attached_there, ADAMW, marks=pytest.mark.quick),
        (_attached_there, optimizer(CountsOnTheDefaultDevice, lr=0.1)),
        (_trained_there, SGD),
    ],
)
@pytest.mark.parametrize("dear", [{}, {"wire_dtype": torch.bfloat16}, {"shard_optimizer": True}], ids=str)
def test_a_default_device_without_values_changes_nothing(on_ranks, loop, factory, dear) -> None:
    check_case(Case(loop, optimizer=factory, dear=dear), on_ranks)
