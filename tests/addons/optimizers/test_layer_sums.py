"""`dx.optim.LARS` and `dx.optim.LAMB`: the papers' updates, the same bits on slices as on whole layers, and SGD or
AdamW without adaptation. That their updates are deferred exactly, the fuzzer draws.
"""

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
from ddp_crossover.watching.separability import why_not_separable
from equivalence import assert_same, snapshot
from models import OddNet

KINDS: dict[str, Any] = {"LARS": dx.optim.LARS, "LAMB": dx.optim.LAMB}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "LARS": {
        "plain": {"lr": 2.0, "momentum": 0.0},
        "momentum": {"lr": 3.0, "weight_decay": 0.01},
        "nesterov": {"lr": 3.0, "nesterov": True, "weight_decay": 0.1, "trust_coefficient": 0.02},
        "dampening": {"lr": 3.0, "momentum": 0.8, "dampening": 0.3, "eps": 0.1},
        "maximize": {"lr": 3.0, "weight_decay": 0.01, "maximize": True, "trust_coefficient": 0.01},
    },
    "LAMB": {
        "plain": {"lr": 0.02},
        "betas": {"lr": 0.05, "betas": (0.6, 0.95), "weight_decay": 0.1, "eps": 1e-3},
        "no_momentum": {"lr": 0.05, "betas": (0.0, 0.9), "weight_decay": 0.0},
        "uncorrected": {"lr": 0.02, "bias_correction": False},
        "max_trust": {"lr": 0.05, "max_trust": 0.7},
    },
}
HALF = (torch.float32, torch.bfloat16, torch.float16)

of_both = pytest.mark.parametrize("kind", KINDS)
with_all_settings = pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(kind, settings, id=f"{kind}-{name}")
        for kind, named in SETTINGS.items()
        for name, settings in named.items()
    ],
)


def make(groups: list[dict[str, Any]], kind: str, **settings: Any) -> Optimizer:
    """The second group has settings of its own."""
    groups[1] |= {"weight_decay": 0.05, "lr": {"LARS": 0.5, "LAMB": 0.03}[kind]}
    defaults = {"LARS": {"lr": 3.0, "weight_decay": 0.01}, "LAMB": {"lr": 0.02}}[kind]
    return KINDS[kind](groups, **defaults | settings)


def lars(weights: list[float], gradients: list[list[float]], settings: dict[str, Any]) -> list[float]:
    """LARS on one layer, number by number, in float64."""
    of = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "trust_coefficient": 0.001, "eps": 1e-8} | settings
    weights, buffer = list(weights), None
    for gradient in gradients:
        if of.get("maximize"):
            gradient = [-each for each in gradient]
        w_norm = math.sqrt(math.fsum(w * w for w in weights))
        g_norm = math.sqrt(math.fsum(g * g for g in gradient))
        trust = 1.0
        if w_norm > 0 and g_norm > 0:
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


def lamb(weights: list[float], gradients: list[list[float]], settings: dict[str, Any]) -> list[float]:
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
        trust = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
        if of["max_trust"] is not None:
            trust = min(trust, of["max_trust"])
        weights = [w - of["lr"] * trust * u for w, u in zip(weights, update, strict=True)]
    return weights


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@with_all_settings
def test_update_is_that_of_the_paper(kind: str, settings: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    reference = {"LARS": lars, "LAMB": lamb}[kind]
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in [(7, 5), (3,), (), (2, 3, 4)]]
    gradients = [[torch.randn_like(p) for _ in range(6)] for p in parameters]
    expected = [
        reference(p.flatten().tolist(), [g.flatten().tolist() for g in own], settings)
        for p, own in zip(parameters, gradients, strict=True)
    ]
    optimizer = KINDS[kind](parameters, **settings)
    for step in range(6):
        for parameter, own in zip(parameters, gradients, strict=True):
            parameter.grad = own[step].clone()
        optimizer.step()
    for parameter, values in zip(parameters, expected, strict=True):
        wanted = torch.tensor(values, dtype=dtype).view_as(parameter)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("ranks", "dtypes"), [(1, HALF[:1]), (2, HALF[:1]), (3, HALF[:1]), (3, HALF)], ids=str)
@with_all_settings
def test_slices_get_the_bits_of_whole_layers(
    kind: str, settings: dict[str, Any], ranks: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    layer_slices.assert_slices_train_as_whole_layers(partial(make, kind=kind, **settings), ranks, dtypes)


@of_both
def test_sums_are_exchanged_once_in_each_step(kind: str) -> None:
    assert layer_slices.calls_of_layer_sums(partial(make, kind=kind)) == [0, 8, 7, 7, 0]


@of_both
def test_a_state_dict_resumes_exactly(kind: str) -> None:
    layer_slices.assert_resumes_exactly(partial(make, kind=kind))


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("settings", SETTINGS["LARS"].values(), ids=SETTINGS["LARS"])
def test_lars_without_adaptation_is_sgd(settings: dict[str, Any], lr: float | torch.Tensor) -> None:
    of_sgd = {"momentum": 0.9} | {k: v for k, v in settings.items() if k not in ("trust_coefficient", "eps")}
    dtypes = [torch.float32, torch.float64]
    expected = layer_slices.train_whole(partial(torch.optim.SGD, **of_sgd | {"lr": lr}), dtypes)
    seen = layer_slices.train_whole(partial(dx.optim.LARS, **settings | {"lr": lr}, adapt=False), dtypes)
    assert_same(seen, expected, "at the end")


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_lamb_without_adaptation_is_adamw(lr: float | torch.Tensor) -> None:
    settings: dict[str, Any] = {"lr": lr, "betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.1}
    expected = layer_slices.train_whole(partial(torch.optim.AdamW, **settings))
    seen = layer_slices.train_whole(partial(dx.optim.LAMB, adapt=False, **settings))
    assert_same(seen["layers"], expected["layers"], "layers", rtol=1e-5, atol=1e-6)
    assert_same(seen["states"], expected["states"], "moments")


@pytest.mark.parametrize(
    ("kind", "settings", "begin", "ends"),
    [
        ("LARS", {"momentum": 0.0}, 1.0, (1 - 0.5 * 0.001, 1 - 0.5 * 2)),
        ("LAMB", {"weight_decay": 0.0}, 2.0, (2 - 0.5 * 2, 2 - 0.5)),
    ],
)
def test_adaptation_is_a_matter_of_the_group(
    kind: str, settings: dict[str, Any], begin: float, ends: tuple[float, float]
) -> None:
    weights = [nn.Parameter(torch.full((3,), begin)) for _ in range(2)]
    optimizer = KINDS[kind]([{"params": weights[:1]}, {"params": weights[1:], "adapt": False}], lr=0.5, **settings)
    for weight in weights:
        weight.grad = torch.full((3,), 2.0)
    optimizer.step()
    for weight, end in zip(weights, ends, strict=True):
        torch.testing.assert_close(weight.detach(), torch.full((3,), end))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("LARS", {"lr": -1.0}, "lr=-1.0: give a learning rate that is at least 0"),
        ("LARS", {"lr": math.nan}, "lr=nan: give a learning rate"),
        ("LARS", {"lr": torch.ones(2)}, r"lr is a tensor of shape \(2,\): give a number"),
        ("LARS", {"momentum": -0.1}, "momentum=-0.1: give a number that is at least 0"),
        ("LARS", {"weight_decay": -0.1}, "weight_decay=-0.1: give a number"),
        ("LARS", {"eps": -1e-8}, "eps=-1e-08: give a number"),
        ("LARS", {"trust_coefficient": 0.0}, "trust_coefficient=0.0: give a number above 0.*adapt=False"),
        ("LARS", {"nesterov": True, "momentum": 0.0}, "nesterov=True with momentum=0.0 and dampening=0.0: give a mom"),
        ("LARS", {"nesterov": True, "dampening": 0.1}, "dampening=0.1: give a momentum above 0, and dampening=0"),
        ("LAMB", {"lr": -1.0}, "lr=-1.0: give a learning rate that is at least 0"),
        ("LAMB", {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\): give two numbers that are at least 0 and below 1"),
        ("LAMB", {"betas": (-0.1, 0.9)}, r"betas=\(-0.1, 0.9\): give two numbers"),
        ("LAMB", {"betas": (0.9,)}, r"betas=\(0.9,\): give two numbers"),
        ("LAMB", {"eps": 0.0}, "eps=0.0: give a number above 0"),
        ("LAMB", {"weight_decay": -0.1}, "weight_decay=-0.1: give a number that is at least 0"),
        ("LAMB", {"max_trust": 0.0}, "max_trust=0.0: give a number above 0, as 10, or None"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind: str, settings: dict[str, Any], message: str) -> None:
    good, bad = {"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], **settings}
    with pytest.raises(ValueError, match=message):
        KINDS[kind](**{"lr": 1.0} | bad)
    optimizer = KINDS[kind]([good], lr=1.0)
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


@pytest.mark.parametrize(
    ("kind", "settings", "of_zero", "of_still", "state"),
    [
        ("LARS", {"momentum": 0.9, "weight_decay": 0.1, "eps": 0.0}, -1.0, 1 - 0.5 * 0.1, "momentum_buffer"),
        ("LAMB", {"weight_decay": 0.0}, -0.5, 1.0, "exp_avg"),
    ],
)
def test_norms_of_zero_give_a_ratio_of_one(
    kind: str, settings: dict[str, Any], of_zero: float, of_still: float, state: str
) -> None:
    zero, still, empty = (nn.Parameter(each) for each in (torch.zeros(3), torch.ones(3), torch.ones(0, 2)))
    optimizer = KINDS[kind]([zero, still, empty], lr=0.5, **settings)
    for parameter, value in ((zero, 2.0), (still, 0.0), (empty, 1.0)):
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    torch.testing.assert_close(zero.detach(), torch.full((3,), of_zero))
    assert_same(snapshot(still), torch.full((3,), of_still), "without a gradient that is not 0")
    assert optimizer.state[empty][state].shape == (0, 2)


@of_both
def test_the_closure_computes_gradients(kind: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = KINDS[kind]([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 3.0
    assert 0 < float(weight.detach()[0]) < 1


@pytest.mark.parametrize(
    ("kind", "stock"), [("LARS", partial(torch.optim.SGD, momentum=0.9)), ("LAMB", torch.optim.Adam)]
)
def test_state_is_named_and_shaped_as_that_of_torchs_optimizer(kind: str, stock: Any) -> None:
    made = []
    for cls in (KINDS[kind], stock):
        weight = nn.Parameter(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
        optimizer = cls([weight], lr=0.1)
        assert not optimizer.state
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = optimizer.state[weight]
        made.append({name: (value.dtype, value.shape, value.stride()) for name, value in state.items()})
    assert made[0] == made[1]


@with_all_settings
def test_nothing_waits_for_the_device(kind: str, settings: dict[str, Any]) -> None:
    layer_slices.assert_nothing_waits_for_the_device(partial(make, kind=kind, **settings))


@with_all_settings
def test_its_updates_can_be_deferred(kind: str, settings: dict[str, Any]) -> None:
    parameters = list(OddNet().parameters())
    others = {"params": [p for p in parameters if p.dim() <= 1], "adapt": False, "weight_decay": 0.0}
    groups = [{"params": [p for p in parameters if p.dim() > 1]}, others]
    assert why_not_separable(KINDS[kind](groups, **settings)) is None
