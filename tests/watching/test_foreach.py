"""Many small parameters are updated in one call of torch's own optimizers only if that gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import ASGD, SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from ddp_crossover.step.run_updates import _BATCH_ELEMENTS, _SMALL_ELEMENTS, _batches
from ddp_crossover.watching import separability
from ddp_crossover.watching.optimizer_snapshot import ToUpdate
from ddp_crossover.watching.separability import judge

SIZES = [(64, 64), (4097,), (1,), (33,), (7, 5, 3), (), (17, 241)]
ALIKE = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd_momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd_nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adamw_maximize": lambda p: AdamW(p, lr=0.01, maximize=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=0.01),
}


def _train(make: Callable[[Any], Optimizer], dtype: torch.dtype, *, foreach: bool | None) -> list[Tensor]:
    noise = torch.Generator().manual_seed(3)
    parameters = [Parameter(torch.randn(size, generator=noise).to(dtype)) for size in SIZES]
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    for step in range(12):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=noise).to(dtype) * 10.0 ** (step - 8)
        optimizer.step()
    state = [value for of_one in optimizer.state.values() for value in of_one.values() if isinstance(value, Tensor)]
    return [*(parameter.detach() for parameter in parameters), *state]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALIKE)
def test_bits_are_those_of_torchs_loop(name: str, dtype: torch.dtype) -> None:
    make = ALIKE[name]
    assert judge(make([Parameter(torch.ones(3, dtype=dtype)), Parameter(torch.ones(3, 3, dtype=dtype))])).foreach
    looped, batched = (_train(make, dtype, foreach=foreach) for foreach in (False, True))
    assert all(map(torch.equal, looped, batched))


@pytest.mark.parametrize("kind", [NAdam, ASGD])
def test_what_a_trial_shows_to_differ_is_left_to_the_loop(kind: type[Any]) -> None:
    assert not judge(kind([Parameter(torch.ones(3, 3))], lr=0.01)).foreach


@pytest.mark.parametrize("lr", [1e-5, 1e-7, 1e-9, 0.0])
@pytest.mark.parametrize("kind", [NAdam, RAdam])
def test_what_differs_is_seen_at_the_learning_rate_of_a_warm_up(kind: type[Any], lr: float) -> None:
    """The rate rises, but the answer stays."""
    separability._answers.clear()
    assert not judge(kind([Parameter(torch.ones(3, 3))], lr=lr)).foreach


@pytest.mark.parametrize(
    "chosen", [{"foreach": False}, {"fused": True}, {"capturable": True}, {"differentiable": True}]
)
def test_the_users_choice_stays(chosen: dict[str, bool]) -> None:
    assert not judge(AdamW([Parameter(torch.ones(3, 3))], **chosen)).foreach  # type: ignore[arg-type]


class _Own(AdamW):
    """A subclass, which may look at one parameter after another."""


def test_optimizers_of_others_stay_as_they_are() -> None:
    assert not judge(_Own([Parameter(torch.ones(3, 3))])).foreach


def test_small_parameters_go_together_and_each_goes_once() -> None:
    numels = [_SMALL_ELEMENTS, 3, _SMALL_ELEMENTS + 1, 0, *[_SMALL_ELEMENTS] * 40, 10**6]
    updates = [ToUpdate(index, torch.empty(numel, device="meta")) for index, numel in enumerate(numels)]
    batches = _batches(updates)
    together = [[each.memory.numel() for each in batch] for batch, settings in batches if settings]
    assert all(max(batch) <= _SMALL_ELEMENTS and sum(batch) <= _BATCH_ELEMENTS for batch in together)
    assert sorted(each.parameter for batch, _ in batches for each in batch) == list(range(len(numels)))
    assert [[each.memory.numel() for each in batch] for batch, settings in batches if not settings] == [
        [_SMALL_ELEMENTS + 1, 10**6]
    ]
