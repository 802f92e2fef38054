"""Whole parameters, each updated by its owner, with the bits of plain DDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from equivalence import Case, check_case
from models import DeepNet
from own_optimizers import OwnOptimizer


class AlongItself(OwnOptimizer):
    """Takes dot products, whose last bits depend on where vectors begin in memory; notes where that is."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            share = torch.dot(p.detach().flatten(), p.grad.flatten()) / (p.detach().square().sum() + 1)
            with torch._C.DisableTorchFunction():  # who reads an address must not be deferred, except this test
                places = [p.data_ptr() % 64, p.grad.data_ptr() % 64]
            self.state[p]["places"] = torch.tensor(places if p.numel() else [0, 0])
            p.sub_(p.grad - share * p, alpha=group["lr"])


def _along(model: nn.Module) -> Optimizer:
    return AlongItself(model.parameters(), lr=0.05)


def test_an_owner_updates_memory_that_begins_where_torch_would_put_it(on_ranks) -> None:
    check_case(Case(model=DeepNet, optimizer=_along, dear={"shard_optimizer": True}), on_ranks)


def test_so_does_a_deferred_update_with_its_gradient(on_ranks) -> None:
    check_case(Case(model=DeepNet, optimizer=_along), on_ranks)
