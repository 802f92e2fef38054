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
