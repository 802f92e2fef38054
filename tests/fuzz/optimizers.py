"""Optimizers of programs, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from .habits import HABITS

_ONE: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd_fused": lambda p: optim.SGD(p, lr=0.05, weight_decay=0.01, fused=True),  # with momentum torch's own may raise
    "momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw_foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_loop": lambda p: optim.AdamW(p, lr=0.01, foreach=False, maximize=True),
    "adamw_fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "adagrad_fused": lambda p: optim.Adagrad(p, lr=0.05, fused=True),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.05),
}


def make(name: str, parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """The optimizers of a model."""
    every: list[Any] = list(parameters)
    trained = [p for p in every if p.requires_grad]
    if name in HABITS:
        return [HABITS[name](every)]
    if name in ("lars", "lamb"):
        import ddp_crossover as dx

        make_one: Any = dx.optim.LARS if name == "lars" else dx.optim.LAMB
        return [make_one(every, lr=0.1 if name == "lars" else 0.01)]
    if name == "grouped":
        return [
            optim.AdamW(
                [
                    {"params": [p for p in trained if p.dim() > 1], "lr": 0.02, "weight_decay": 0.1},
                    {"params": [p for p in trained if p.dim() <= 1], "betas": (0.5, 0.9), "eps": 1e-5},
                ],
                lr=0.01,
                weight_decay=0.0,
            )
        ]
    if name == "two":
        matrices = [p for p in trained if p.dim() == 2 and p.numel()]
        rest = [p for p in trained if p.dim() != 2 or not p.numel()]
        return [optim.SGD(matrices, lr=0.05, momentum=0.9), *([optim.AdamW(rest, lr=0.01)] if rest else [])]
    if name == "interleaved":  # fusion groups hold parameters of both
        return [optim.SGD(every[::2], lr=0.1, momentum=0.9), optim.AdamW(every[1::2], lr=0.01)]
    if name == "partial":  # some parameters get gradients but have no optimizer
        return [optim.AdamW(every[::2], lr=0.01)]
    return [_ONE[name](every)]
