"""Small models that several loops train, and the loop of every tutorial."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adversarial import Script


def mlp(features: int = 8, hidden: int = 16, outputs: int = 4) -> nn.Sequential:
    """Three layers: enough that gradients travel in several groups."""
    return nn.Sequential(
        nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of most loops."""
    return nn.functional.mse_loss(output, target)


def train_step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The five lines of every tutorial."""
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def fit(run: Script, model: nn.Module, optimizer: Any) -> None:
    """The loop around them, which looks at losses."""
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
