"""`dx.optim.LARS`: the paper's update, the same bits on slices as on whole layers, and SGD without adaptation."""

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
    "plain": {"lr": 2.0, "momentum": 0.0},
    "momentum": {"lr": 3.0, "weight_decay": 0.01},
    "nesterov": {"lr": 3.0, "nesterov": True, "weight_decay": 0.1, "trust_coefficient": 0.02},
    "dampening": {"lr": 3.0, "momentum": 0.8, "dampening": 0.3, "eps": 0.1},
    "maximize": {"lr": 3.0, "weight_decay": 0.01, "maximize": True, "trust_coefficient": 0.01},
}
HALF = (torch.float32, torch.bfloat16, torch.float16)


def make(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    """The second group has settings of its own."""
    groups[1] |= {"weight_decay": 0.05, "lr": 0.5}
    return dx.optim.LARS(groups, **{"lr": 3.0, "weight_decay": 0.01} | settings)


def reference(weights: list[float], gradients: list[list[float]], settings: dict[str, Any]) -> list[float]:
    """LARS on one layer, number by number, in float64."""
    of = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "trust_coefficient": 0.001, "eps": 1e-8} | settings
    weights, buffer = list(weights), None
    for gradient in gradients:
        if of.get("maximize"):
            gradient = [-each for each in gradient]
        w_norm = math.sqrt(math.fsum(w * w for w in weights))
        g_norm = math.sqrt(math.fsum(g * g for g in gradient))
        trust = 1.0
        if w_norm > 0 and g_norm > 0 and of.get("adapt", True):
            trust = of["trust_coefficient"] * w_norm / (g_norm + of["weight_decay"] * w_norm + of["eps"])
        update = [trust * (g + of["weight_decay"] * w) for g, w in zip(gradient, weights, strict=True)]
        if of["momentum"]:
            if buffer is None:
                buffer = list(update)
            else:
                kept = 1 - of["dampening"]
                buffer = [of["momentum"] * b + kept * u for b, u in zip(buffer, update, strict=True)]
            taken = of["momentum"] if of.get("nesterov") else 0.0
            update = [u + taken * b for u, b in zip(update, buffer, strict=True)] if taken else buffer
        weights = [w - of["lr"] * u for w, u in zip(weights, update, strict=True)]
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
    optimizer = dx.optim.LARS(parameters, **settings)
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


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_without_adaptation_it_is_sgd(settings: dict[str, Any], lr: float | torch.Tensor) -> None:
    of_sgd = {"momentum": 0.9} | {k: v for k, v in settings.items() if k not in ("trust_coefficient", "eps")}

    def sgd(groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.SGD(groups, **of_sgd | {"lr": lr})

    def lars(groups: list[dict[str, Any]]) -> Optimizer:
        return dx.optim.LARS(groups, **settings | {"lr": lr}, adapt=False)

    dtypes = [torch.float32, torch.float64]
    assert_same(layer_slices.train_whole(lars, dtypes), layer_slices.train_whole(sgd, dtypes), "at the end")


def test_adaptation_is_a_matter_of_the_group() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = dx.optim.LARS([{"params": weights[:1]}, {"params": weights[1:], "adapt": False}], lr=0.5, momentum=0.0)
    for weight in weights:
        weight.grad = torch.full((3,), 2.0)
    optimizer.step()
    assert_same(snapshot(weights[1]), torch.zeros(3), "as SGD")
    torch.testing.assert_close(weights[0].detach(), torch.full((3,), 1 - 0.5 * 0.001))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: give a learning rate that is at least 0"),
        ({"lr": math.nan}, "lr=nan: give a learning rate"),
        ({"lr": torch.ones(2)}, r"lr is a tensor of shape \(2,\): give a number"),
        ({"momentum": -0.1}, "momentum=-0.1: give a number that is at least 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: give a number"),
        ({"eps": -1e-8}, "eps=-1e-08: give a number"),
        ({"trust_coefficient": 0.0}, "trust_coefficient=0.0: give a number above 0.*adapt=False"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov=True with momentum=0.0 and dampening=0.0: give a momentum"),
        ({"nesterov": True, "dampening": 0.1}, "dampening=0.1: give a momentum above 0, and dampening=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    good, bad = {"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], **settings}
    with pytest.raises(ValueError, match=message):
        dx.optim.LARS(**{"lr": 1.0} | bad)
    optimizer = dx.optim.LARS([good], lr=1.0)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "gradient",
    [torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True), torch.ones(3, dtype=torch.cfloat)],
    ids=["sparse", "complex"],
)
def test_gradients_that_have_no_layer_norm_are_refused(gradient: torch.Tensor) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=gradient.dtype))
    parameter.grad = gradient
    optimizer = dx.optim.LARS([parameter], lr=1.0)
    with pytest.raises(TypeError, match=r"LARS takes dense real gradients, and one of shape \(3,\) is"):
        optimizer.step()


def test_norms_of_zero_give_a_ratio_of_one() -> None:
    zero, still, empty = (nn.Parameter(each) for each in (torch.zeros(3), torch.ones(3), torch.ones(0, 2)))
    optimizer = dx.optim.LARS([zero, still, empty], lr=0.5, momentum=0.9, weight_decay=0.1, eps=0.0)
    for parameter, value in ((zero, 2.0), (still, 0.0), (empty, 1.0)):
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    assert_same(snapshot([zero, still]), [torch.full((3,), -1.0), torch.full((3,), 1 - 0.5 * 0.1)], "after a step")
    assert optimizer.state[empty]["momentum_buffer"].shape == (0, 2)


def test_the_closure_computes_gradients() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = dx.optim.LARS([weight], lr=1.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 3.0
    assert 0 < float(weight.detach()[0]) < 1


def test_state_is_named_and_shaped_as_that_of_sgd() -> None:
    weight = nn.Parameter(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    optimizer = dx.optim.LARS([weight], lr=1.0)
    assert not optimizer.state
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight].keys() == {"momentum_buffer"}
    buffer = optimizer.state[weight]["momentum_buffer"]
    assert (buffer.shape, buffer.stride()) == (weight.shape, weight.stride())


def test_nothing_waits_for_the_device() -> None:
    for settings in SETTINGS.values():
        layer_slices.assert_nothing_waits_for_the_device(partial(make, **settings))


def test_its_updates_can_be_deferred() -> None:
    for settings in SETTINGS.values():
        optimizer = grouped(OddNet(), **settings)
        assert why_not_separable(optimizer) is None


def grouped(model: nn.Module, **settings: Any) -> Optimizer:
    """Weights, and the rest as the docstring has it."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = {"params": [p for p in model.parameters() if p.dim() <= 1], "adapt": False, "weight_decay": 0.0}
    return dx.optim.LARS([{"params": weights}, others | {"lr": 0.05}], **{"lr": 5.0, "weight_decay": 0.01} | settings)


def test_plain_ddp_is_one_process_with_averaged_gradients(on_ranks) -> None:
    on_ranks(layer_slices.ddp_and_one_process, 2, grouped)


@pytest.mark.parametrize("schedule", ["dear", "auto"])
@pytest.mark.parametrize("model", [OddNet, DeepNet])
def test_deferred_updates_are_exact(on_ranks, model: type[nn.Module], schedule: str) -> None:
    check_case(Case(model=model, optimizer=grouped, dear={"schedule": schedule}), on_ranks)
