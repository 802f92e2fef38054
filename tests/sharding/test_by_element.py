"""Which optimizers may update slices: the trial finds those for which a slice is no part of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from ddp_crossover.sharding.by_element import why_not_by_element
from models import INPUTS, OddNet
from optimizers import OPTIMIZERS
from own_optimizers import OwnOptimizer

WHOLE = {
    "sgd_fused": "fused",
    "adamw_fused": "fused",
    "adagrad_fused": "fused",
    "adafactor": "gave other values",
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers(name: str) -> None:
    model = OddNet(empty_parameter=name != "adafactor")
    why = why_not_by_element(OPTIMIZERS[name](model))
    assert (why is None) if name not in WHOLE else WHOLE[name] in (why or "")


def test_matrix_optimizers_take_whole_matrices() -> None:
    muon = optim.Muon([nn.Parameter(torch.randn(5, 6))])
    assert "2D matrix" in (why_not_by_element(muon) or "")


class _Normalized(OwnOptimizer):
    """Steps by the direction of each gradient, as layer-wise optimizers do."""

    def update(self, group, parameters) -> None:
        for p in parameters:
            p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-12))


def test_layer_wise_optimizers_take_whole_layers() -> None:
    assert "gave other values" in (why_not_by_element(_Normalized([nn.Parameter(torch.randn(40))])) or "")


def test_the_optimizer_and_random_states_stay_as_they_are() -> None:
    model = OddNet()
    adam = optim.Adam(model.parameters())
    model(torch.randn(3, INPUTS)).sum().backward()
    adam.step()
    before, random_state = [p.clone() for p in model.parameters()], torch.random.get_rng_state()
    assert why_not_by_element(adam) is None
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(torch.random.get_rng_state(), random_state)
