"""Optimizers whose settings live elsewhere than in numbers of their param groups, and change after step()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from adversary.nets import mlp, train_step
from adversary.script import Script, adversarial

TOO_LATE = "SILENT: a deferred update uses a setting that the script has changed after step()"
CONFIG = {"lr": 0.1}


class Configured(Optimizer):
    """Takes its rate from a global that the script changes, as code with a global `args` does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=CONFIG["lr"])
        return loss


@pytest.mark.xfail(strict=True, reason=TOO_LATE)
@adversarial(deferred=0, fallback="")
def test_rate_comes_from_a_global_that_changes_after_step(run: Script) -> None:
    CONFIG["lr"] = 0.1
    model, optimizer = run.train(mlp(), Configured)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        CONFIG["lr"] *= 0.8


class Scheduled(Optimizer):
    """Its groups hold a function that gives the rate."""

    def __init__(self, params: Any, rate: Any) -> None:
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["rate"]())
        return loss


@pytest.mark.xfail(strict=True, reason=TOO_LATE)
@adversarial(deferred=0, fallback="")
def test_rate_is_a_function_in_the_group(run: Script) -> None:
    done = 0
    model, optimizer = run.train(mlp(), Scheduled, rate=lambda: 0.2 / (1 + done))
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        done += 1


@pytest.mark.xfail(strict=True, reason=TOO_LATE)
@adversarial(deferred=0, fallback="")
def test_rate_lives_in_a_list_that_all_groups_share(run: Script) -> None:
    """A mutable setting inside of a mutable setting, edited after step."""

    class Nested(Optimizer):
        def __init__(self, params: Any, settings: dict[str, Any]) -> None:
            super().__init__(params, {"settings": settings})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = torch.enable_grad()(closure)() if closure else None
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["settings"]["rates"][0])
            return loss

    settings = {"rates": [0.2]}
    model, optimizer = run.train(mlp(), Nested, settings=settings)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        settings["rates"][0] *= 0.8


class Tagged(Optimizer):
    """Scales each update by an attribute of the parameter, as muP and layerwise rates do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * getattr(p, "scale", 1.0))
        return loss


@adversarial(deferred=0, fallback="")
def test_updates_are_scaled_by_an_attribute_of_the_parameter(run: Script) -> None:
    net = mlp()
    for index, p in enumerate(net.parameters()):
        p.scale = 1.0 / (1 + index)
    model, optimizer = run.train(net, Tagged, lr=0.3)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@pytest.mark.xfail(strict=True, reason=TOO_LATE)
@adversarial(deferred=0, fallback="")
def test_attribute_of_the_parameter_changes_after_step(run: Script) -> None:
    net = mlp()
    for p in net.parameters():
        p.scale = 1.0
    model, optimizer = run.train(net, Tagged, lr=0.3)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        for p in net.parameters():
            p.scale *= 0.8
