"""Two ranks with batches of different sizes, and beside them the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weighted_loops import SAMPLES, Weighted, WeightedRun, plain, samples_of

STEPS = 10
mse = nn.functional.mse_loss

Train = Callable[["Ranks", torch.Tensor, torch.Tensor], None]
"""Goes forward and backward with a rank's samples of one step."""


class Ranks:
    """Two ranks with 4 and 8 samples of each step, and the same training in one process."""

    def __init__(self, ddp: dict[str, Any] | None = None, **dear: Any) -> None:
        self.run = WeightedRun(Weighted(plain, ddp=ddp or {}, dear=dear), on_ranks=True)
        self.alone = WeightedRun(Weighted(plain), on_ranks=False)
        self.state, self.model, self.optimizer = self.run.state, self.run.model, self.run.optimizer
        self.rank = self.run.rank
        self.number = 0

    def step(self, number: int, train: Train, sizes: tuple[int, int] = (4, 8)) -> None:
        """Make step `number` of both trainings; this rank's part of it is `train`."""
        self.number = number
        x, y = samples_of(number, torch.float64)
        for optimizer in (self.optimizer, self.alone.optimizer):
            optimizer.zero_grad()
        mse(self.alone.model(x), y).backward()
        low = 0 if self.rank == 0 else SAMPLES - sizes[1]
        high = sizes[0] if self.rank == 0 else SAMPLES
        train(self, x[low:high], y[low:high])
        self.optimizer.step()
        self.alone.optimizer.step()

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Forward and backward with one batch."""
        with self.state.batch(len(x)):
            mse(self.model(x), y).backward()

    def backward_by_halves(self, x: torch.Tensor, y: torch.Tensor, between: Callable[[], None] | None = None) -> None:
        """The same in two micro-batches, of which the first is under ``no_sync()``."""
        half = len(x) // 2
        with self.model.no_sync(), self.state.batch(half):
            (mse(self.model(x[:half]), y[:half]) / 2).backward()
        if between is not None:
            between()
        with self.state.batch(half):
            (mse(self.model(x[half:]), y[half:]) / 2).backward()

    def check(self) -> None:
        """The parameters are those of one process."""
        for ours, other in zip(self.run.net.parameters(), self.alone.net.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), other.detach(), rtol=1e-12, atol=1e-12)


def usual(ranks: Ranks, x: torch.Tensor, y: torch.Tensor) -> None:
    """The step of every tutorial."""
    ranks.backward(x, y)


def train_and_check(train: Train) -> None:
    """All steps, after which the parameters must be those of one process."""
    ranks = Ranks()
    for number in range(STEPS):
        ranks.step(number, train)
    ranks.check()
    ranks.state.detach()
