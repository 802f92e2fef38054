"""What the arbiter remembers of jobs, members, resources and holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from .protocol import Role


class JobKey(NamedTuple):
    """Two users' jobs of the same name are two jobs."""

    uid: int
    name: str


@dataclass
class Job:
    """A job, wherever it has members."""

    key: JobKey
    role: Role
    weight: float
    virtual_s: float = 0.0
    members: set[int] = field(default_factory=set)
    resources: int = 0  # how many it has members on

    def charge_per_s(self) -> float:
        # Its virtual time is the mean over its resources: a job on four GPUs is not four times as greedy.
        return 1.0 / (self.weight * max(1, self.resources))


@dataclass
class Member:
    """One connection: a process of a job, on one resource."""

    job: Job
    resource: Resource
    last_request: int = 0
    waiting: bool = False


@dataclass
class Hold:
    """A job's turn on a resource."""

    job: Job
    fence: int
    since_s: float
    members: set[int]
    served: set[int] = field(default_factory=set)  # members that have held and released under this fence
    limit_s: float = math.inf
    ends_s: float = math.inf

    def running_virtual_s(self, now_s: float) -> float:
        return self.job.virtual_s + (now_s - self.since_s) * self.job.charge_per_s()


@dataclass
class Resource:
    """A GPU: who wants it, who has it."""

    name: str
    members: set[int] = field(default_factory=set)
    queue: dict[JobKey, float] = field(default_factory=dict)  # waiting jobs: since when
    hold: Hold | None = None
    # Virtual time at which a job of that role starts that was away.
    floors_s: dict[Role, float] = field(default_factory=lambda: dict.fromkeys(Role, 0.0))
