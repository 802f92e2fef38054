"""Optimizers whose settings live elsewhere than in numbers of their param groups, and change after step()."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from adversarial import Script, adversarial
from adversary.nets import fit, mlp, train_step


class Rated(Optimizer):
    """Asks a method for the rate of each parameter."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    def rate(self, group: dict[str, Any], p: Any) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=self.rate(group, p))
        return loss


def _train(
    run: Script, kind: type[Rated], change: Callable[[int], None], net: nn.Module | None = None, **settings: Any
) -> None:
    """A setting changes after each step."""
    model, optimizer = run.train(mlp() if net is None else net, kind, **settings)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        change(step)


CONFIG = {"lr": 0.1}


def _shrink(step: int) -> None:
    CONFIG["lr"] *= 0.8


@adversarial(fallback="reads the global variable CONFIG")
def test_rate_comes_from_a_global_that_changes_after_step(run: Script) -> None:
    """As code with a global `args` does."""

    class Configured(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return CONFIG["lr"]

    CONFIG["lr"] = 0.1
    _train(run, Configured, _shrink)


@adversarial(fallback=r"reads files \(the global variable open\)")
def test_rate_is_read_from_a_file_that_changes_after_step(run: Script) -> None:
    """As somebody does who wants to lower it while training runs."""

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rate"

        class FromFile(Rated):
            def rate(self, group: dict[str, Any], p: Any) -> Any:
                with open(path) as file:
                    return float(file.read())

        def write(step: int) -> None:
            with open(path, "w") as file:
                file.write(f"{0.1 / (step + 2)}")

        write(-1)
        _train(run, FromFile, write)


FACTOR = 0.2


class OfClass(Rated):
    factor = 0.2
    factors: ClassVar[dict[str, list[float]]] = {"all": [0.2]}

    def rate(self, group: dict[str, Any], p: Any) -> Any:
        return FACTOR * self.factor * self.factors["all"][0] * 10


class FromOfClass(OfClass):
    pass


def _lower_factor(step: int) -> None:
    global FACTOR
    FACTOR *= 0.8


LOWERED: dict[str, Callable[[int], Any]] = {
    "global": _lower_factor,
    "class": lambda step: setattr(OfClass, "factor", OfClass.factor * 0.8),
    "list in the class": lambda step: OfClass.factors["all"].append(OfClass.factors["all"].pop() * 0.8),
    "heir": lambda step: setattr(FromOfClass, "factor", FromOfClass.factor * 0.8),
}


@adversarial(
    cases={f"{name} {first}": (name, first) for name in LOWERED for first in (0, 8)}, fallback="which has changed"
)
def test_numbers_of_a_class_and_a_module_change_after_step(run: Script, case: Any) -> None:
    name, first = case
    _lower_factor.__globals__["FACTOR"] = OfClass.factor = OfClass.factors["all"][0] = 0.2
    if "factor" in vars(FromOfClass):
        del FromOfClass.factor

    def lower(step: int) -> None:
        if step >= first:
            LOWERED[name](step)

    _train(run, FromOfClass, lower)


def _configured() -> float:
    return CONFIG["lr"]


@adversarial(fallback="reads the global variable CONFIG")
def test_rate_is_a_function_in_the_group(run: Script) -> None:
    class Scheduled(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return group["rate"]()

    CONFIG["lr"] = 0.1
    _train(run, Scheduled, _shrink, rate=_configured)


@dataclass
class Config:
    lr: float = 0.1


@adversarial()
def test_settings_are_an_object_in_the_group(run: Script) -> None:
    class FromObject(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return group["config"].lr

    config = Config()

    def shrink(step: int) -> None:
        config.lr *= 0.8

    _train(run, FromObject, shrink, config=config)


@adversarial()
def test_rate_lives_in_a_list_that_all_groups_share(run: Script) -> None:
    """A mutable setting inside of a mutable setting, edited after step."""

    class Nested(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return group["settings"]["rates"][0]

    settings = {"rates": [0.2]}

    def shrink(step: int) -> None:
        settings["rates"][0] *= 0.8

    _train(run, Nested, shrink, settings=settings)


class Tagged(Rated):
    """Scales each update by an attribute of the parameter, as muP and layerwise rates do."""

    def rate(self, group: dict[str, Any], p: Any) -> Any:
        return 0.3 * getattr(p, "scale", 1.0)


@adversarial(cases={"there_before": 0, "first_set_after_a_step": 4})
def test_attribute_of_the_parameter_changes_after_step(run: Script, case: int) -> None:
    net = mlp()

    def shrink(step: int) -> None:
        for p in net.parameters():
            if step >= case:
                p.scale = 0.8 * getattr(p, "scale", 1.0)

    if case == 0:
        shrink(0)
    _train(run, Tagged, shrink, net)


@adversarial()
def test_attribute_of_the_parameter_is_nested_and_edited_in_place(run: Script) -> None:
    class OfParameters(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return p.rates["of weights"][0] * p.factor.item()

    net = mlp()
    for p in net.parameters():
        p.rates, p.factor = {"of weights": [0.2]}, torch.ones(())

    def shrink(step: int) -> None:
        for p in net.parameters():
            p.rates["of weights"][0] *= 0.9
            p.factor.mul_(0.9)

    _train(run, OfParameters, shrink, net)


@adversarial(fallback="reads the global variable CONFIG")
def test_attribute_of_the_parameter_is_a_function(run: Script) -> None:
    class Asking(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            return p.rate()

    CONFIG["lr"] = 0.1
    net = mlp()
    for p in net.parameters():
        p.rate = _configured
    _train(run, Asking, _shrink, net)


@adversarial(fallback="sets attributes of the parameters")
def test_step_leaves_a_note_on_each_parameter(run: Script) -> None:
    class Noting(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            p.size_of_update = 0.1 * p.grad.norm().item()
            return 0.1

    net = mlp()
    _train(run, Noting, lambda step: run.log([p.size_of_update for p in net.parameters()]), net)


@adversarial(fallback="draws random numbers")
def test_rates_are_drawn_from_generators_that_the_script_uses_too(run: Script) -> None:
    """With Langevin noise, so that all three generators are drawn from, and dropout in forward."""

    class Noisy(Rated):
        def rate(self, group: dict[str, Any], p: Any) -> Any:
            p.add_(torch.randn_like(p), alpha=0.01)
            return 0.1 * (np.random.rand() + random.random())

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    fit(run, *run.train(nn.Sequential(mlp(), nn.Dropout(0.3)), Noisy))
