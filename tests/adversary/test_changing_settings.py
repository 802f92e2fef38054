"""Optimizers that change their own settings, while something else has or changes them, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adversarial import Script, adversarial
from adversary.nets import mlp, train_step
from own_optimizers import OwnOptimizer


@dataclass
class Count:
    """What a script would call its schedule."""

    steps: float = 0
    is_clipping: bool = False


def _train(
    run: Script, make: Callable[[nn.Module], Any], change: Callable[[Any, int], None] = lambda *_: None, steps: int = 14
) -> None:
    """``change`` is called after each step."""
    net = mlp()
    model, optimizer = run.ddp(net), make(net)
    run.attach(model, optimizer)
    for number, (x, y) in enumerate(run.batches(steps)):
        run.log(train_step(model, optimizer, x, y), list(getattr(optimizer, "rates", ())))
        change(optimizer, number)


class CountsPerGroup(OwnOptimizer):
    """Its groups share what they count in, which is that of the defaults."""

    def __init__(self, net: nn.Module, count: Any) -> None:
        parameters = list(net.parameters())
        super().__init__([{"params": parameters[:2]}, {"params": parameters[2:]}], count=count)

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        count = group["count"]
        if isinstance(count, Count):
            count.steps += 1
        else:
            count += 1
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] / float(count.steps if isinstance(count, Count) else count))


class CountsElsewhere(OwnOptimizer):
    """Counts in an attribute, and reads the count from its group."""

    def __init__(self, net: nn.Module, count: Any) -> None:
        super().__init__(net.parameters(), count=count)
        self.count = count

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.count.steps += 1
        return super().step(closure)

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] / (1 + group["count"].steps))


SHARED: dict[str, Callable[[nn.Module], Any]] = {
    "object of groups": lambda net: CountsPerGroup(net, Count()),
    "tensor of groups": lambda net: CountsPerGroup(net, torch.zeros(())),
    "object of an attribute and a group": lambda net: CountsElsewhere(net, Count()),
}


@adversarial(cases=SHARED, fallback="which another setting or param group shares")
def test_two_settings_are_one(run: Script, case: Any) -> None:
    _train(run, case)


class ClipsLater(OwnOptimizer):
    """Counts in something in which a script switches on that it clips by the norm of all gradients."""

    def __init__(self, net: nn.Module, settings: Any) -> None:
        super().__init__(net.parameters())
        self.settings = settings

    @property
    def values(self) -> dict[str, Any]:
        return self.settings if isinstance(self.settings, dict) else vars(self.settings)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.values["steps"] += 1
        return super().step(closure)

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        scale = 1.0
        if self.values["is_clipping"] and parameters:
            scale = 0.1 / float(torch.stack([p.grad.norm() for p in parameters]).norm())
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * scale / self.values["steps"])


def _switch_on(optimizer: Any, step: int) -> None:
    if step == 7:
        optimizer.values["is_clipping"] = True


@adversarial(
    cases={"object": lambda: Count(), "dict": lambda: vars(Count())}, fallback="does not update each parameter indep"
)
def test_a_script_changes_a_setting_beside_a_count(run: Script, case: Any) -> None:
    _train(run, lambda net: ClipsLater(net, case()), _switch_on)


class CountsInTuple(OwnOptimizer):
    """Does something else in some steps after the trial, by a count that is in a tuple."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = ([0], "steps")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.counts[0][0] += 1
        return super().step(closure)

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * (0.1 if self.counts[0][0] in (15, 18) else 1.0))


@adversarial()
def test_each_update_begins_with_the_same_count_in_a_tuple(run: Script) -> None:
    _train(run, lambda net: CountsInTuple(net.parameters()), steps=22)


class CountsInfinities(OwnOptimizer):
    """Leaves parameters alone whose gradients are infinite, and slows down by their number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.infinities = 0

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        scale = 1 / (1 + self.infinities)
        for p in parameters:
            if p.grad.isinf().any():
                self.infinities += 1
            else:
                p.add_(p.grad, alpha=-group["lr"] * scale)


@adversarial(fallback="other values of its attribute .infinities")
def test_parameters_that_were_left_alone_are_counted(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, CountsInfinities)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        if step in (6, 8):
            loss = loss + (net[0].weight.sum() + net[2].weight.sum()) * float("inf")
        loss.backward()
        optimizer.step()
        run.log([p.sum() for p in net.parameters()])


class KeepsRates(OwnOptimizer):
    """Notes the rate of each step in a list, from which a script takes it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates: list[float] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def _take(optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9
    if step % 3:
        optimizer.rates.clear()
    else:
        optimizer.rates.append(1.0)


@adversarial()
def test_a_script_takes_what_a_step_has_put_into_a_list(run: Script) -> None:
    _train(run, lambda net: KeepsRates(net.parameters()), _take)
