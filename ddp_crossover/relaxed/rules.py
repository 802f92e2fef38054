"""After which steps ranks share their parameters: every so many, or when gradients change. All decide the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Exchange = Callable[[int], Callable[[], list[int]]]


@dataclass(frozen=True, kw_only=True)
class GradientChange:
    """``LocalSGD(every=GradientChange(threshold))``: share after steps in which gradients change.

    A rank's gradients change by ``|E_t - E_(t-1)| / E_(t-1)``, where E is a moving average of their squared norm over
    all parameters. If that is at least ``threshold`` on any rank, all share. Ranks tell each other while the next step
    runs, so the decision is one step late, and nobody waits for it.

    Source: SelSync, arXiv 2307.07950, which decides after each backward, so that nothing travels under it.

    Args:
        threshold: the least change. 0 is after every step; infinity, never. A norm that grows to its double in one
            step changes the average by ``3 / window``.
        window: steps over which E averages. The first ``window`` steps are all shared after.
        at_most: share after so many steps at the latest.

    Raises:
        ValueError: for numbers that are out of range.
    """

    threshold: float
    window: int = 25
    at_most: int = 100

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"GradientChange: threshold must be from 0, got {self.threshold!r}")
        for name in ("window", "at_most"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"GradientChange: {name} must be a whole number from 1, got {value!r}")


class Rule(Protocol):
    """Decides after each step."""

    def note(self, gradients: Tensor, scale: float | Tensor) -> None:
        """Look at a bucket of this rank's gradients, which are ``scale`` times too large."""

    def is_due(self, steps: int) -> bool:
        """Whether to share after the last of ``steps`` steps. Called once after each, on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


def make_rule(every: int | GradientChange, exchange: Exchange) -> Rule:
    """The rule for one model.

    Args:
        every: what the user has set.
        exchange: sends a number to all ranks; returns a function that waits for theirs.
    """
    return _Period(every) if isinstance(every, int) else _Change(every, exchange)


class _Period:
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def note(self, gradients: Tensor, scale: float | Tensor) -> None:
        pass

    def is_due(self, steps: int) -> bool:
        return steps % self._steps == 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _Change:
    def __init__(self, settings: GradientChange, exchange: Exchange) -> None:
        self._settings = settings
        self._exchange = exchange
        self._square: Tensor | float = 0.0  # of this step's gradients; read when the device has computed it
        self._average: float | None = None
        self._since = 0  # steps since the last one that was shared after
        self._answer: Callable[[], list[int]] | None = None

    @torch.no_grad()
    def note(self, gradients: Tensor, scale: float | Tensor) -> None:
        norm = torch.linalg.vector_norm(gradients).double() / scale
        self._square = self._square + norm * norm

    def is_due(self, steps: int) -> bool:
        self._since += 1
        others_say = self._answer is None or any(self._answer())
        self._answer = self._exchange(int(self._changes()))
        is_due = others_say or steps <= self._settings.window or self._since >= self._settings.at_most
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
        self._average = before + (square - before) / self._settings.window
        return abs(self._average - before) / before >= self._settings.threshold

    def state_dict(self) -> dict[str, Any]:
        answer = None if self._answer is None else self._answer()
        if answer is not None:
            self._answer = lambda: answer
        return {"square": float(self._square), "average": self._average, "since": self._since, "answer": answer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._square, self._average, self._since = state["square"], state["average"], state["since"]
        answer = state["answer"]
        self._answer = None if answer is None else lambda: answer
