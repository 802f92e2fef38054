"""Code that asks autograd to be called at the end of backward finds there what it finds under plain DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.autograd import Variable

from equivalence import ADAMW, SGD, Case, Run, check_case
from models import DeepNet


@dataclass(frozen=True)
class Called:
    """A hook of the first gradient asks to be called at the end, and once more then: so it comes after DDP's own."""

    parameter: int
    edits: bool = False

    def __call__(self, run: Run) -> Iterator[Any]:
        parameters = list(run.model.parameters())
        seen: list[torch.Tensor] = []

        def asks_again() -> None:
            _at_the_end(lambda: _reads(parameters, seen, edits=self.edits))

        parameters[self.parameter].register_hook(lambda _: _at_the_end(asks_again))
        for x, y in run.batches():
            run.optimizer.zero_grad()
            loss = run.loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            yield loss, seen
            seen.clear()


def _at_the_end(function: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(function)


def _reads(parameters: list[torch.Tensor], seen: list[torch.Tensor], *, edits: bool) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        if edits:
            parameter.grad.mul_(0.5)
        seen.append(parameter.grad.clone())


ARMS = {
    "default": {},
    "dear": {"schedule": "dear"},
    "allreduce": {"schedule": "allreduce"},
    "sharded": {"shard_optimizer": True},
}


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("parameter", [0, -1], ids=["last gradient", "first gradient"])
def test_gradients_are_reduced_there(on_ranks, parameter, arm) -> None:
    check_case(Case(Called(parameter), DeepNet, ADAMW, dear=ARMS[arm], pipelined=False), on_ranks)


@pytest.mark.parametrize("views", [False, True])
def test_they_can_be_edited_there(on_ranks, views) -> None:
    ddp = {"gradient_as_bucket_view": views}
    check_case(Case(Called(-1, edits=True), DeepNet, SGD, ddp=ddp, pipelined=False), on_ranks)
