"""The figures of relaxed training, and a state in a few lines, for ``print(state)``."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

from ddp_crossover.addons.relaxed.policy import Policy
from ddp_crossover.fusion import MB
from ddp_crossover.log import short


class RelaxedStats(NamedTuple):
    """Figures of relaxed training on this rank.

    Attributes:
        steps: backward passes that DDP would have reduced.
        means: how often ranks have shared their parameters.
        divergence: how far this rank's parameters were from the mean when it was last made, relative to its norm.
        sent_bytes: what this rank has sent for means.
    """

    steps: int
    means: int
    divergence: float
    sent_bytes: int

    def __str__(self) -> str:
        """Return the figures in one line."""
        if not self.means:
            return f"{self.steps} steps, no mean yet"
        means = f"{self.means} mean{'s' if self.means > 1 else ''}"
        return (
            f"{self.steps} steps, {means}, {short(self.sent_bytes / MB)} MiB sent for that; at the latest one this "
            f"rank was away from it by {self.divergence:.2g} of its norm"
        )


def summary(about_model: str, policy: Policy, doing: str, stats: RelaxedStats) -> str:
    """Return model, policy, what is done now and the figures."""
    return "\n  ".join([f"RelaxedState of {about_model}", _settings(policy), doing, str(stats)])


def _settings(policy: Policy) -> str:
    """The policy with what is not at its default."""
    given = [
        f"{field.name}={getattr(policy, field.name)!r}"
        for field in fields(policy)
        if getattr(policy, field.name) != field.default
    ]
    return f"{type(policy).__name__}({', '.join(given)})"
