"""A judgement of an optimizer holds for the settings under which it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ddp_crossover.watching.known_optimizers import KnownOptimizers
from ddp_crossover.watching.noted_numbers import Comparisons
from ddp_crossover.watching.step_watch import StepWatch
from own_optimizers import OwnOptimizer


class Clips(OwnOptimizer):
    """Clips by the norm of all gradients, if any of its settings says so."""

    always = False

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **{"max_norm": 0.0, "most": 1e9, "mode": "none", "momentum": 0.9, **settings})
        self.norm, self.scale = 0.0, 0.5

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        clips = group["max_norm"] > 0 or group["most"] < 1e6 or group["mode"] == "norm" or self.norm
        clips = clips or self.defaults["mode"] == "norm" or self.always
        scale = group["momentum"] * self.scale
        if clips:
            scale /= float(torch.stack([p.grad.norm() for p in parameters]).norm())
        for p in parameters:
            p.sub_(p.grad, alpha=group["lr"] * scale)


def _made(make: Callable[[Any], Optimizer] = Clips) -> tuple[KnownOptimizers, Any]:
    torch.manual_seed(0)
    optimizer = make(nn.Linear(3, 3).parameters())
    return KnownOptimizers([optimizer], lambda p: "p"), optimizer


def _step(known: KnownOptimizers, optimizer: Optimizer) -> bool:
    """Makes a step, watched if it is to be; returns whether it was."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    known.look_again(optimizer)
    if is_watched := known.is_to_be_watched(optimizer):
        with (watch := StepWatch(optimizer)):
            optimizer.step()
        known.learn(optimizer, watch.seen)
    else:
        optimizer.step()
    return is_watched


def _how_often(known: KnownOptimizers, optimizer: Optimizer, steps: int = 6) -> int:
    return sum(_step(known, optimizer) for _ in range(steps))


def test_the_first_two_updates_of_each_parameter_are_watched() -> None:
    known, optimizer = _made()
    assert _how_often(known, optimizer) == 2
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})
    assert _how_often(known, optimizer) == 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda optimizer: optimizer.param_groups[0].update(max_norm=0.1),
    "large number": lambda optimizer: optimizer.param_groups[0].update(most=0.1),
    "string": lambda optimizer: optimizer.param_groups[0].update(mode="norm"),
    "attribute": lambda optimizer: setattr(optimizer, "norm", 1.0),
    "default": lambda optimizer: optimizer.defaults.update(mode="norm"),
    "new setting": lambda optimizer: optimizer.param_groups[0].update(more=0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_setting_switches_on_is_found_before_anything_is_deferred(change: str) -> None:
    known, optimizer = _made()
    _how_often(known, optimizer)
    CHANGES[change](optimizer)
    known.look_again(optimizer)
    assert known.why_not(optimizer) is not None or known.is_to_be_watched(optimizer)
    _how_often(known, optimizer)
    assert (known.why_not(optimizer) is not None) is (change != "new setting")


def test_what_changes_outside_of_it_makes_it_wait_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    known, optimizer = _made()
    _how_often(known, optimizer)
    with monkeypatch.context() as changed:
        changed.setattr(Clips, "always", True)
        known.look_again(optimizer)
        assert known.why_not(optimizer) == (
            "its step() reads the class attribute Clips.always, which has changed. Pass it in a param group"
        )
    known.look_again(optimizer)
    assert known.why_not(optimizer) is not None


def test_and_what_is_switched_off_again_is_deferred_again_without_a_watch() -> None:
    known, optimizer = _made()
    _how_often(known, optimizer)
    optimizer.param_groups[0]["mode"] = "norm"
    assert _how_often(known, optimizer) == 0 and known.why_not(optimizer) is not None
    optimizer.param_groups[0]["mode"] = "none"
    assert _how_often(known, optimizer) == 0 and known.why_not(optimizer) is None


SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "lr": lambda optimizer, step: optimizer.param_groups[0].update(lr=0.1 / (step + 1)),
    "lr of numpy": lambda optimizer, step: optimizer.param_groups[0].update(lr=np.float64(0.1) / (step + 1)),
    "short lr of numpy": lambda optimizer, step: optimizer.param_groups[0].update(lr=np.float32(0.1 / (step + 1))),
    "momentum": lambda optimizer, step: optimizer.param_groups[0].update(momentum=0.5 + step / 100),
    "attribute": lambda optimizer, step: setattr(optimizer, "scale", 0.5 + step / 100),
    "a number that is compared": lambda optimizer, step: optimizer.param_groups[0].update(most=1e9 + step),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_costs_nothing(schedule: str) -> None:
    known, optimizer = _made()
    watched = 0
    for step in range(10):
        SCHEDULES[schedule](optimizer, step)
        watched += _step(known, optimizer)
    assert watched == 2


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numbers_of_numpy_note_what_decides(kind: type) -> None:
    known, optimizer = _made(lambda parameters: Clips(parameters, most=kind(1e9)))
    _how_often(known, optimizer)
    optimizer.param_groups[0]["most"] = kind(0.1)
    known.look_again(optimizer)
    assert known.why_not(optimizer) is not None or known.is_to_be_watched(optimizer)


def test_schedules_of_torchs_own_optimizers_cost_nothing() -> None:
    known, optimizer = _made(lambda parameters: AdamW(parameters, weight_decay=0.1))
    watched = 0
    for step in range(10):
        optimizer.param_groups[0].update(betas=(0.8 + step / 100, 0.9), weight_decay=0.1 + step, lr=1e-3 * (step + 1))
        watched += _step(known, optimizer)
    assert watched == 2


def test_an_optimizer_whose_settings_change_all_the_time_waits_and_says_so() -> None:
    known, optimizer = _made()
    for step in range(40):
        optimizer.param_groups[0]["mode"] = str(step)
        _step(known, optimizer)
    assert "32 different settings" in (known.why_not(optimizer) or "")


def test_a_counter_of_its_own_is_no_setting() -> None:
    class Counts(OwnOptimizer):
        def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
            group["k"] = group.get("k", 0) + 1
            for p in parameters:
                p.sub_(p.grad, alpha=group["lr"] / group["k"])

    known, optimizer = _made(Counts)
    assert _how_often(known, optimizer) == 2 and known.verdict(optimizer).counters == {"k"}


def test_a_schedulers_and_a_scalers_attributes_are_no_settings() -> None:
    known, optimizer = _made(lambda parameters: SGD(parameters, lr=0.1, fused=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _how_often(known, optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    assert _how_often(known, optimizer) == 0
    scheduler.step()


# Numbers that note how they are compared.


def test_numbers_note_what_decides() -> None:
    comparisons = Comparisons()
    names = ("only computed", "compared", "as a truth", "after arithmetic", "its digits")
    numbers = [comparisons.noted(name, 0.5) for name in names]
    betas = comparisons.noted("betas", (0.5, [0.5]))
    assert comparisons.by_name == {}
    with comparisons.listening():
        torch.ones(2).add_(torch.ones(2), alpha=-numbers[0] * 2)
        assert numbers[1] < 1 and numbers[2] and 1 - numbers[3] > 0.1 and round(numbers[4]) == 0 and betas[1][0] <= 1
    kinds = {name: [comparisons.kind(name, value) for value in (0.5, 0.6, 1.5)] for name in names}
    assert len(set(kinds["only computed"])) == 1
    assert kinds["compared"][0] == kinds["compared"][1] != kinds["compared"][2]
    assert len(set(kinds["as a truth"])) == 1 and comparisons.kind("as a truth", 0.0) != kinds["as a truth"][0]
    assert len(set(kinds["after arithmetic"])) == len(set(kinds["its digits"])) == 3
    assert comparisons.kind("betas", (0.5, [0.5])) == comparisons.kind("betas", (0.9, [0.9]))
    assert comparisons.kind("betas", (0.5, [0.5])) != comparisons.kind("betas", (0.5, [1.5]))
