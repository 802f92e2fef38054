"""Which optimizers may update slices: the trial finds those for which a slice is no part of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from ddp_crossover.addons.shards.by_element import why_not_by_element
from models import INPUTS, OddNet
from optimizers import OPTIMIZERS
from own_optimizers import OwnOptimizer

WHOLE = {
    "sgd_fused": "fused",
    "adamw_fused": "fused",
    "adagrad_fused": "fused",
    "adafactor": "gave other values",
}
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):  # whose Adagrad makes its state at once, for the whole
    WHOLE["adagrad"] = "a trial step on flat slices failed"


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


class _Rows(OwnOptimizer):
    """Looks at rows of large matrices only, as factored second moments do."""

    def update(self, group, parameters) -> None:
        for p in parameters:
            is_large = p.ndim == 2 and min(p.shape) >= 16
            scale = p.grad.square().mean(1, keepdim=True).sqrt() if is_large else 1.0
            p.sub_(p.grad / scale, alpha=group["lr"])


class _Shrinks(OwnOptimizer):
    """Treats large matrices in another way, but each element by itself."""

    def update(self, group, parameters) -> None:
        for p in parameters:
            if p.ndim == 2 and min(p.shape) >= 16:
                p.mul_(0.9)
            p.sub_(p.grad, alpha=group["lr"])


class _ByWidth(OwnOptimizer):
    """As muP: the rate depends on the shape."""

    def update(self, group, parameters) -> None:
        for p in parameters:
            p.sub_(p.grad, alpha=group["lr"] / (p.shape[-1] if p.numel() > 5000 else 1))


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        (_Rows, (32, 32), "looks at several elements"),
        (_Rows, (32, 15), None),
        (_Shrinks, (32, 32), "is not what it does to its slices"),
        (_Shrinks, (32, 15), None),
        (_ByWidth, (100, 100), "is not what it does to its slices"),
        (_ByWidth, (10, 100), None),
    ],
)
def test_what_goes_by_size_is_found_at_the_sizes_of_the_model(kind, shape, expected) -> None:
    why = why_not_by_element(kind([nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(shape))]))
    assert why is None if expected is None else expected in (why or "")


class _Powers(OwnOptimizer):
    """Elementwise; but on a CPU the last elements of a loop are computed in another way than whole vectors are."""

    def update(self, group, parameters) -> None:
        for p in parameters:
            self.state[p].setdefault("size", torch.zeros_like(p)).lerp_(p.grad.abs(), 0.1)
            p.sub_(p.grad.sign() * self.state[p]["size"] ** group["exponent"], alpha=group["lr"])


@pytest.mark.parametrize(("exponent", "is_whole"), [(0.3, True), (1.5, True), (2, False), (0.5, False)])
def test_what_rounds_by_place_takes_whole_parameters(exponent: float, is_whole: bool) -> None:
    why = why_not_by_element(_Powers([nn.Parameter(torch.randn(40, 3))], exponent=exponent))
    assert (why is not None) == is_whole, why


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
