"""Optimizers as scripts write them by themselves, on one base."""

from __future__ import annotations

from collections.abc import Callable
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
        for group in self.param_groups:
            self.update(group, [p for p in group["params"] if p.grad is not None])
        return loss

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
