"""A gradient that is on the wire does not send torch's foreach functions to their slow path."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _foreach_utils

from ddp_crossover.pending.pending_gradient import PendingGrad
from ddp_crossover.torch_internals.dispatch import allow_foreach
from equivalence import SGD, Case, Run

pytestmark = pytest.mark.quick


def train_and_ask() -> tuple[set[str], bool, int]:
    run = Run(Case(optimizer=SGD), with_dear=True)
    for x, y in run.batches():
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        run.optimizer.step()
    gradients = [parameter.grad for parameter in run.model.parameters()]
    # Asks for types only, so it answers without a GPU.
    supported = _foreach_utils._has_foreach_support(gradients, torch.device("cuda"))
    run.detach()
    return (
        {type(gradient).__name__ for gradient in gradients},
        supported,
        _foreach_utils._foreach_supported_types.count(PendingGrad),
    )


def test_pending_gradients_take_foreach_paths(on_ranks) -> None:
    assert on_ranks(train_and_ask, 1) == [({"PendingGrad"}, True, 1)]


def test_a_torch_without_the_list_is_named(monkeypatch) -> None:
    monkeypatch.delattr(_foreach_utils, "_foreach_supported_types")
    with pytest.raises(RuntimeError, match="_foreach_supported_types, which torch"):
        allow_foreach(PendingGrad)
