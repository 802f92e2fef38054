"""What the arbiter remembers of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..protocol import Role


class JobKey(NamedTuple):
    """Identity of a job. Jobs of two users are distinct even if their names are equal."""

    uid: int
    name: str


@dataclass(slots=True, eq=False)
class Job:
    """A job, on all resources that its members are connected to."""

    key: JobKey
    role: Role
    weight: float
    virtual_s: float = 0.0  # weighted virtual time, see fairness.py
    shared_resources: int = 0  # how many of its resources other jobs are connected to as well

    def charge(self, held_s: float) -> None:
        """Add to its virtual time. That is a mean over shared resources: four GPUs must not count fourfold."""
        self.virtual_s += held_s / (self.weight * max(1, self.shared_resources))

    def start_level_with(self, virtual_s: float) -> None:
        """Forget what it lags behind this time."""
        self.virtual_s = max(self.virtual_s, virtual_s)

    def competes_on(self, resources: int) -> None:
        self.shared_resources = resources
