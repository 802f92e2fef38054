"""`dx.optim.LAMB`: the paper's update, the same bits on slices as on whole layers, and AdamW without adaptation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import ddp_crossover as dx
import layer_slices
from ddp_crossover.optim.separability import why_not_separable
from equivalence import Case, assert_same, check_case, snapshot
from models import DeepNet, OddNet

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.02},
    "betas": {"lr": 0.05, "betas": (0.6, 0.95), "weight_decay": 0.1, "eps": 1e-3},
    "no_momentum": {"lr": 0.05, "betas": (0.0, 0.9), "weight_decay": 0.0},
    "uncorrected": {"lr": 0.02, "bias_correction": False},
    "max_trust": {"lr": 0.05, "max_trust": 0.7},
}
HALF = (torch.float32, torch.bfloat16, torch.float16)


def make(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    """The second group has settings of its own."""
    groups[1] |= {"weight_decay": 0.05, "lr": 0.03}
    return dx.optim.LAMB(groups, **{"lr": 0.02} | settings)


def reference(weights: list[float], gradients: list[list[float]], settings: dict[str, Any]) -> list[float]:
    """LAMB on one layer, number by number, in float64."""
    of = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "max_trust": None} | settings
    beta1, beta2 = of["betas"]
    weights, m, v = list(weights), [0.0] * len(weights), [0.0] * len(weights)
    for step, gradient in enumerate(gradients, start=1):
        m = [beta1 * a + (1 - beta1) * g for a, g in zip(m, gradient, strict=True)]
        v = [beta2 * a + (1 - beta2) * g * g for a, g in zip(v, gradient, strict=True)]
        lack1, lack2 = (1 - beta1**step, 1 - beta2**step) if of.get("bias_correction", True) else (1.0, 1.0)
        update = [
            a / lack1 / (math.sqrt(b / lack2) + of["eps"]) + of["weight_decay"] * w
            for a, b, w in zip(m, v, weights, strict=True)
        ]
        w_norm = math.sqrt(math.fsum(w * w for w in weights))
        u_norm = math.sqrt(math.fsum(u * u for u in update))
        trust = w_norm / u_norm if w_norm > 0 and u_norm > 0 and of.get("adapt", True) else 1.0
        if of["max_trust"] is not None:
            trust = min(trust, of["max_trust"])
        weights = [w - of["lr"] * trust * u for w, u in zip(weights, update, strict=True)]
    return weights


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_update_is_that_of_the_paper(settings: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in [(7, 5), (3,), (), (2, 3, 4)]]
    gradients = [[torch.randn_like(p) for _ in range(6)] for p in parameters]
    expected = [
        reference(p.flatten().tolist(), [g.flatten().tolist() for g in own], settings)
        for p, own in zip(parameters, gradients, strict=True)
    ]
    optimizer = dx.optim.LAMB(parameters, **settings)
    for step in range(6):
        for parameter, own in zip(parameters, gradients, strict=True):
            parameter.grad = own[step].clone()
        optimizer.step()
    for parameter, values in zip(parameters, expected, strict=True):
        wanted = torch.tensor(values, dtype=dtype).view_as(parameter)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_slices_get_the_bits_of_whole_layers(settings: dict[str, Any], ranks: int) -> None:
    layer_slices.assert_slices_train_as_whole_layers(partial(make, **settings), ranks, [torch.float32])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_slices_get_the_bits_of_whole_layers_in_16_bits(settings: dict[str, Any]) -> None:
    layer_slices.assert_slices_train_as_whole_layers(partial(make, **settings), 3, HALF)


def test_sums_are_exchanged_once_in_each_step() -> None:
    assert layer_slices.calls_of_layer_sums(make) == [0, 8, 7, 7, 0]


def test_a_state_dict_resumes_exactly() -> None:
    layer_slices.assert_resumes_exactly(make)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_without_adaptation_it_is_adamw(lr: float | torch.Tensor) -> None:
    settings: dict[str, Any] = {"lr": lr, "betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.1}
    expected = layer_slices.train_whole(partial(torch.optim.AdamW, **settings))
    seen = layer_slices.train_whole(partial(dx.optim.LAMB, adapt=False, **settings))
    assert_same(seen["layers"], expected["layers"], "layers", rtol=1e-5, atol=1e-6)
    assert_same(seen["states"], expected["states"], "moments")


def test_adaptation_is_a_matter_of_the_group() -> None:
    weights = [nn.Parameter(torch.full((3,), 2.0)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "adapt": False}]
    optimizer = dx.optim.LAMB(groups, lr=0.5, weight_decay=0.0)
    for weight in weights:
        weight.grad = torch.full((3,), 3.0)
    optimizer.step()
    torch.testing.assert_close(weights[0].detach(), torch.full((3,), 2 - 0.5 * 2))
    torch.testing.assert_close(weights[1].detach(), torch.full((3,), 2 - 0.5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: give a learning rate that is at least 0"),
        ({"lr": torch.ones(2)}, r"lr is a tensor of shape \(2,\): give a number"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\): give two numbers that are at least 0 and below 1"),
        ({"betas": (-0.1, 0.9)}, r"betas=\(-0.1, 0.9\): give two numbers"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\): give two numbers"),
        ({"eps": 0.0}, "eps=0.0: give a number above 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: give a number that is at least 0"),
        ({"max_trust": 0.0}, "max_trust=0.0: give a number above 0, as 10, or None"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    good, bad = {"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], **settings}
    with pytest.raises(ValueError, match=message):
        dx.optim.LAMB(**bad)
    optimizer = dx.optim.LAMB([good])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1


def test_norms_of_zero_give_a_ratio_of_one() -> None:
    zero, still, empty = (nn.Parameter(each) for each in (torch.zeros(3), torch.ones(3), torch.ones(0, 2)))
    optimizer = dx.optim.LAMB([zero, still, empty], lr=0.5, weight_decay=0.0)
    for parameter, value in ((zero, 2.0), (still, 0.0), (empty, 1.0)):
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.5))
    assert_same(snapshot(still), torch.ones(3), "without a gradient that is not 0")
    assert optimizer.state[empty]["exp_avg"].shape == (0, 2)


def test_the_closure_computes_gradients() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = dx.optim.LAMB([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 3.0
    assert 0 < float(weight.detach()[0]) < 1


def test_state_is_named_and_shaped_as_that_of_adam() -> None:
    made = []
    for cls in (dx.optim.LAMB, torch.optim.Adam):
        weight = nn.Parameter(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
        optimizer = cls([weight], lr=0.1)
        assert not optimizer.state
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        made.append(snapshot(optimizer.state[weight]))
    assert_same(made[0], made[1], "state")


def test_nothing_waits_for_the_device() -> None:
    for settings in SETTINGS.values():
        layer_slices.assert_nothing_waits_for_the_device(partial(make, **settings))


def test_its_updates_can_be_deferred() -> None:
    for settings in SETTINGS.values():
        assert why_not_separable(grouped(OddNet(), **settings)) is None


def grouped(model: nn.Module, **settings: Any) -> Optimizer:
    """Weights, and the rest as the docstring has it."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = {"params": [p for p in model.parameters() if p.dim() <= 1], "adapt": False, "weight_decay": 0.0}
    return dx.optim.LAMB([{"params": weights}, others], **{"lr": 0.02} | settings)


def test_plain_ddp_is_one_process_with_averaged_gradients(on_ranks) -> None:
    on_ranks(layer_slices.ddp_and_one_process, 2, grouped)


@pytest.mark.parametrize("schedule", ["dear", "auto"])
@pytest.mark.parametrize("model", [OddNet, DeepNet])
def test_deferred_updates_are_exact(on_ranks, model: type[nn.Module], schedule: str) -> None:
    check_case(Case(model=model, optimizer=grouped, dear={"schedule": schedule}), on_ranks)
