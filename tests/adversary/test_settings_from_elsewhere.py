"""Optimizers whose settings live elsewhere than in numbers of their param groups, and change after step()."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from adversarial import Script, adversarial
from adversary import nets
from adversary.nets import mlp, train_step

CONFIG = {"lr": 0.1, "done": 0}
RATE = 0.1


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
def test_updates_are_scaled_by_an_attribute_of_the_parameter(run: Script) -> None:
    net = mlp()
    for index, p in enumerate(net.parameters()):
        p.scale = 1.0 / (1 + index)
    model, optimizer = run.train(net, Tagged, lr=0.3)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


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


def _rate_of(config: Config) -> float:
    return config.lr


@adversarial(fallback="hold a partial in 'rate'")
def test_rate_is_a_partial_function_in_the_group(run: Script) -> None:
    config = Config()
    model, optimizer = run.train(mlp(), Scheduled, rate=partial(_rate_of, config))
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        config.lr *= 0.8
    optimizer.param_groups[0]["rate"] = None  # its repr() tells an address


@adversarial(fallback="reads the class attribute OfClass.lr")
def test_rate_is_an_attribute_of_the_class(run: Script) -> None:
    class OfClass(Rated):
        lr = 0.1

        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return self.__class__.lr

    model, optimizer = run.train(mlp(), OfClass)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        OfClass.lr *= 0.8


def _rate_now() -> float:
    return RATE


@adversarial(fallback="reads the global variable RATE,")
def test_helper_reads_a_number_that_the_script_sets_by_global(run: Script) -> None:
    class ByHelper(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return _rate_now()

    global RATE
    RATE = 0.1
    model, optimizer = run.train(mlp(), ByHelper)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        RATE *= 0.8


@adversarial(fallback="reads rates of an enclosing function")
def test_rate_lives_in_a_list_around_the_class(run: Script) -> None:
    rates = [0.1]

    class ByClosure(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return rates[0]

    model, optimizer = run.train(mlp(), ByClosure)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        rates[0] *= 0.8


@adversarial(fallback="reads the global variable CONFIG")
def test_rate_is_a_property_that_reads_a_global(run: Script) -> None:
    class ByProperty(Rated):
        @property
        def current(self) -> float:
            return CONFIG["lr"]

        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return self.current

    CONFIG["lr"] = 0.1
    model, optimizer = run.train(mlp(), ByProperty)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        CONFIG["lr"] *= 0.8


class Current:
    """What is in force when it is asked for."""

    def __init__(self) -> None:
        self.rate = CONFIG["lr"]


@adversarial(fallback="reads the global variable CONFIG")
def test_rate_is_read_where_an_object_is_made(run: Script) -> None:
    class ByObject(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return Current().rate

    CONFIG["lr"] = 0.1
    model, optimizer = run.train(mlp(), ByObject)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        CONFIG["lr"] *= 0.8


@adversarial(fallback="reads the global variable CONFIG")
def test_rate_is_an_attribute_that_is_made_when_it_is_asked_for(run: Script) -> None:
    class ByName(Rated):
        def __getattr__(self, name: str) -> float:
            if name in CONFIG:
                return CONFIG[name]
            raise AttributeError(name)

        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return self.lr

    CONFIG["lr"] = 0.1
    model, optimizer = run.train(mlp(), ByName)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        CONFIG["lr"] *= 0.8


@adversarial(fallback="reads the attribute adversary.nets.rate")
def test_rate_is_a_variable_of_a_module_that_goes_by_another_name(run: Script) -> None:
    class ByModule(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            module = nets
            return module.rate

    nets.rate = 0.1
    model, optimizer = run.train(mlp(), ByModule)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        nets.rate *= 0.8


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
