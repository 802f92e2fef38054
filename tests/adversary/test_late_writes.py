"""Optimizers that write down something that happens to few parameters, and in none of the steps that were watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adversarial import Script, adversarial
from adversary.nets import mlp
from own_optimizers import OwnOptimizer, SetsLate


class _Spikes(OwnOptimizer):
    """Leaves a parameter alone whose gradient is far too large, and says so."""

    def say(self, group: dict[str, Any], p: Any) -> None:
        raise NotImplementedError

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            if 1e8 < float(p.grad.abs().max()) < float("inf"):
                self.say(group, p)
            else:
                p.add_(p.grad, alpha=-group["lr"])


class InAttribute(_Spikes):
    """Counts in an attribute, which it reads where the step begins."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.spikes = 0

    def say(self, group: dict[str, Any], p: Any) -> None:
        self.spikes += 1

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        super().update({**group, "lr": group["lr"] / (1 + self.spikes)}, parameters)


class InGroup(_Spikes):
    """Counts in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, spikes=0)

    def say(self, group: dict[str, Any], p: Any) -> None:
        group["spikes"] = 1 + group["spikes"]


class InState(_Spikes):
    """Counts in the state, under a key that is no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["spikes"] = 0  # type: ignore[index, assignment]

    def say(self, group: dict[str, Any], p: Any) -> None:
        self.state["spikes"] += 1  # type: ignore[index, operator]


class AsFlag(_Spikes):
    """Remembers that it has happened."""

    has_warned = False

    def say(self, group: dict[str, Any], p: Any) -> None:
        self.has_warned = True


def _train(run: Script, make: Callable[[Any], Any]) -> None:
    net = mlp()
    model, optimizer = run.train(net, make)
    for step, (x, y) in enumerate(run.batches(14)):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        if step in (6, 9):
            loss = loss + _of_some(net) * 1e9
        loss.backward()
        optimizer.step()
        run.log([p.sum() for p in net.parameters()])
        run.log([group.get("spikes") for group in optimizer.param_groups], vars(optimizer).get("spikes"))
        run.log(vars(optimizer).get("has_warned"), dict.get(optimizer.state, "spikes"))


def _of_some(net: nn.Sequential) -> torch.Tensor:
    total: torch.Tensor = net[0].weight.sum() + 2 * net[2].weight.sum() + 3 * net[2].bias.sum()  # type: ignore[union-attr, operator]
    return total


@adversarial(cases={each.__name__: each for each in (InAttribute, InGroup, InState, AsFlag)})
def test_what_happens_to_few_parameters_is_noted_as_by_a_whole_step(run: Script, case: Callable[[Any], Any]) -> None:
    _train(run, case)


@adversarial()
def test_a_group_is_added_before_an_update_has_set_it(run: Script) -> None:
    model = mlp()
    trained, added = list(model.parameters())[:2], list(model.parameters())[2:]
    model, optimizer = run.train(model, lambda _: SetsLate(trained))
    for step, (x, y) in enumerate(run.batches(14)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if step == 4:
            optimizer.add_param_group({"params": added})
        run.log(loss.detach())
