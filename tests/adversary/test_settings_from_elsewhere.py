"""Optimizers whose settings live elsewhere than in numbers of their param groups, and change after step()."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from adversarial import Script, adversarial
from adversary.nets import mlp, train_step

CONFIG = {"lr": 0.1, "done": 0}


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


@adversarial(fallback="reads the global variable CONFIG")
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


def _decayed() -> float:
    return 0.2 / (1 + CONFIG["done"])


@adversarial(fallback="hold a function in 'rate'")
def test_rate_is_a_function_in_the_group(run: Script) -> None:
    CONFIG["done"] = 0
    model, optimizer = run.train(mlp(), Scheduled, rate=_decayed)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        CONFIG["done"] += 1


@adversarial()
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


@adversarial()
def test_attribute_of_the_parameter_changes_after_step(run: Script) -> None:
    net = mlp()
    for p in net.parameters():
        p.scale = 1.0
    model, optimizer = run.train(net, Tagged, lr=0.3)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        for p in net.parameters():
            p.scale *= 0.8


@dataclass
class Config:
    lr: float = 0.1


class Rated(Optimizer):
    """Asks a method for the rate of each parameter."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    def rate(self, group: dict[str, Any], p: Any) -> Any:
        return group["config"].lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=self.rate(group, p))
        return loss


@adversarial()
def test_attribute_of_the_parameter_is_nested_and_edited_in_place(run: Script) -> None:
    class OfParameters(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return p.rates["of weights"][0] * p.factor.item()

    net = mlp()
    for p in net.parameters():
        p.rates, p.factor = {"of weights": [0.2]}, torch.ones(())
    model, optimizer = run.train(net, OfParameters)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        for p in net.parameters():
            p.rates["of weights"][0] *= 0.9
            p.factor.mul_(0.9)


@adversarial()
def test_attribute_of_the_parameter_is_first_set_after_step(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Tagged, lr=0.3)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step == 4:
            for p in net.parameters():
                p.scale = 0.5


@adversarial(fallback="a parameter has a function in .rate")
def test_attribute_of_the_parameter_is_a_function(run: Script) -> None:
    class Asking(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return p.rate()

    CONFIG["done"] = 0
    net = mlp()
    for p in net.parameters():
        p.rate = _decayed
    model, optimizer = run.train(net, Asking)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        CONFIG["done"] += 1


@adversarial(fallback="sets attributes of the parameters")
def test_step_leaves_a_note_on_each_parameter(run: Script) -> None:
    class Noting(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            p.size_of_update = 0.1 * p.grad.norm().item()
            return 0.1

    net = mlp()
    model, optimizer = run.train(net, Noting)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        run.log([p.size_of_update for p in net.parameters()])


@adversarial(fallback="hold a Config in 'config'")
def test_settings_are_an_object_in_the_group(run: Script) -> None:
    config = Config()
    model, optimizer = run.train(mlp(), Rated, config=config)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        config.lr *= 0.8


@adversarial(fallback="a trial on a small clone gave different results")
def test_rates_are_drawn_from_generators_that_the_script_uses_too(run: Script) -> None:
    class Noisy(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return 0.1 * (np.random.rand() + random.random())

    random.seed(0)
    np.random.seed(0)
    model, optimizer = run.train(mlp(), Noisy)
    for x, y in run.batches():
        run.log([train_step(model, optimizer, x, y), np.random.rand(), random.random()])
