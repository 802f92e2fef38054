"""Sharing when gradients change: SelSync (arXiv 2307.07950), as a rule for local steps. It loses to a fixed period."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_crossover.addons.relaxed.policies import LocalSGD
from ddp_crossover.addons.relaxed.rule import Exchange, Rule


@dataclass(frozen=True, kw_only=True)
class SelSync(LocalSGD):
    """:class:`LocalSGD` that shares after steps in which gradients change, instead of every so many.

    A rank's gradients change by ``|E_t - E_(t-1)| / E_(t-1)``, where E is a moving average of their squared norm over
    all parameters. If that is at least ``threshold`` on any rank, all share. Ranks tell each other while the next step
    runs, so the decision is one step late, and nobody waits for it; in the paper it comes after each backward.

    Args:
        threshold: the least change. 0 is after every step; infinity, never. A norm that grows to its double in one
            step changes the average by ``3 / window``.
        window: steps over which E averages. The first ``window`` steps are all shared after.
        every: share after so many steps at the latest.

    Raises:
        ValueError: for numbers that are out of range.
    """

    threshold: float
    window: int = 25
    every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold >= 0:
            raise ValueError(f"SelSync: threshold must be from 0, got {self.threshold!r}")
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"SelSync: window must be a whole number from 1, got {self.window!r}")

    def rule(self, exchange: Exchange) -> Rule:
        return _Change(self, exchange)


class _Change(Rule):
    def __init__(self, policy: SelSync, exchange: Exchange) -> None:
        super().__init__(policy.every)
        self._policy = policy
        self._exchange = exchange
        self._square: Tensor | float = 0.0  # of this step's gradients; read when the device has computed it
        self._average: float | None = None
        self._since = 0  # steps since the last one that was shared after
        self._answer: Callable[[], list[int]] | None = None

    @torch.no_grad()
    def note(self, gradients: Tensor, scale: Callable[[], float | Tensor]) -> None:
        norm = torch.linalg.vector_norm(gradients).double() / scale()
        self._square = self._square + norm * norm

    def is_due(self, steps: int) -> bool:
        self._since += 1
        others_say = self._answer is None or any(self._answer())
        self._answer = self._exchange(int(self._changes()))
        is_due = others_say or steps <= self._policy.window or self._since >= self._policy.every
        if is_due:
            self._since = 0
        return is_due

    def _changes(self) -> bool:
        square, before = float(self._square), self._average
        self._square = 0.0
        if not math.isfinite(square):
            return True  # an overflow, which the average must not remember
        if not before:
            self._average = square
            return True
        self._average = before + (square - before) / self._policy.window
        return abs(self._average - before) / before >= self._policy.threshold

    def state_dict(self) -> dict[str, Any]:
        answer = None if self._answer is None else self._answer()
        if answer is not None:
            self._answer = lambda: answer
        return {"square": float(self._square), "average": self._average, "since": self._since, "answer": answer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._square, self._average, self._since = state["square"], state["average"], state["since"]
        answer = state["answer"]
        self._answer = None if answer is None else lambda: answer
