"""Optimizers as scripts write them by themselves, on one base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer


class OwnOptimizer(Optimizer):
    """Plain SGD; subclasses update the parameters of a group that have gradients in another way."""

    def __init__(self, params: Any, lr: float = 0.05, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_all(loss)
        return loss

    def update_all(self, loss: Any) -> None:
        """Update all groups; `loss` is what the closure has returned, or None if there is none."""
        for group in self.param_groups:
            self.update(group, [p for p in group["params"] if p.grad is not None])

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"])


class LooksAtItsGroupFirst(OwnOptimizer):
    """Reads a setting of its first group, and counts there, before it calls its closure."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr, is_on=True, calls=0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.param_groups[0]["is_on"]:
            raise RuntimeError("it is off")
        self.param_groups[0]["calls"] += 1
        return super().step(closure)


class SlowsDown(OwnOptimizer):
    """Keeps nothing but the number of updates of each parameter, which no tensor beside it shows."""

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            self.state[p]["updates"] = updates = self.state[p].get("updates", 0) + 1
            p.add_(p.grad, alpha=-group["lr"] / updates)


# What belongs to no parameter.


class CountsInState(OwnOptimizer):
    """Counts steps in the state, under a key that is no parameter, as MADGRAD does."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if "k" not in self.state:
            self.state["k"] = torch.zeros((), dtype=torch.int64, device="cpu")  # type: ignore[index]
        loss = super().step(closure)
        self.state["k"] += 1  # type: ignore[index]
        return loss

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] / (1 + self.state["k"].item()))  # type: ignore[index]


class CountsInAttribute(OwnOptimizer):
    """Counts steps in an attribute, as StableSPAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] / self.steps)


class BeginsForAll(CountsInAttribute):
    """Makes state of all parameters in its first step, and notes in an attribute that it has, as SGD-SaI does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.has_begun = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.has_begun:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["scale"] = 0.5
            self.has_begun = True
        return super().step(closure)

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * self.state[p]["scale"] / self.steps)


class SetsLate(OwnOptimizer):
    """Sets an attribute in an update, not in the first ones, and reads it in the next ones."""

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            self.state[p]["step"] = step = self.state[p].get("step", 0) + 1
            if step == 5:
                self.decay = 0.5
            elif step > 5:
                p.mul_(1 - group["lr"] * getattr(self, "decay", 0.0))
            p.add_(p.grad, alpha=-group["lr"])


class LooksUp(OwnOptimizer):
    """Keeps in a table of its group, which is that of the defaults, what the step decides, as RAdam does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, table=[[None, None] for _ in range(3)])

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            self.state[p]["step"] = step = self.state[p].get("step", 0) + 1
            entry = group["table"][step % 3]
            if entry[0] != step:
                entry[:] = step, group["lr"] / step
            p.add_(p.grad, alpha=-entry[1])


@dataclass
class _Rates:
    """What a script configures."""

    lr: float


class HasObject(OwnOptimizer):
    """Reads a setting from an object in an attribute, as nadir does, which changes in training."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = _Rates(0.05)

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-self.rates.lr)

    def change(self) -> None:
        self.rates.lr = 0.01


class CountsInObject(OwnOptimizer):
    """Counts steps in an object of its group, beside a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, counted=_Rates(0.0), factors=[0.5, 2.0])

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        group["counted"].lr += 1.0
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * group["factors"][0] / group["counted"].lr)
