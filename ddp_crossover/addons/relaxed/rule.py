"""After which steps ranks share their parameters: every so many, unless a policy brings a rule of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# Sends a number to all ranks; returns a function that waits for theirs. A collective.
Exchange = Callable[[int], Callable[[], list[int]]]


class Rule:
    """Decides after each step of one model; all ranks must decide the same.

    Args:
        every: steps between two means.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def note(self, gradients: Tensor, scale: Callable[[], float | Tensor]) -> None:
        """Look at a bucket of this rank's gradients, flat, which are ``scale()`` times too large."""

    def is_due(self, steps: int) -> bool:
        """Whether to share after the last of ``steps`` steps. Called once after each, on all ranks."""
        return steps % self._every == 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
