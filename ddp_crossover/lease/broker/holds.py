"""The arbiter's records of jobs, members, resources and holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from ..protocol import Role

# Limit on the uncontested time that one hold is charged for. A longer time alone does not fill another job's gap, and
# charging for all of it could put the job hours behind when another job arrives.
_LONGEST_GAP_S = 0.1


class JobKey(NamedTuple):
    """Identity of a job. Jobs of two users are distinct even if their names are equal."""

    uid: int
    name: str


@dataclass(slots=True)
class Job:
    """A job, on all resources that its members are connected to."""

    key: JobKey
    role: Role
    weight: float
    virtual_s: float = 0.0
    members: set[int] = field(default_factory=set)
    shared_resources: int = 0  # how many of its resources other jobs are connected to as well

    def charge(self, held_s: float) -> None:
        """Add held time. Virtual time is the mean over shared resources: four GPUs must not count fourfold."""
        self.virtual_s += held_s / (self.weight * max(1, self.shared_resources))


@dataclass(slots=True)
class Member:
    """One connection of one process of a job, on one resource."""

    job: Job
    resource: Resource
    last_request: int = 0
    waiting: bool = False


@dataclass(slots=True)
class Hold:
    """A job's turn on a resource."""

    job: Job
    fence: int
    members: set[int]
    start_s: float = 0.0
    found_free: bool = False  # no job held or waited for the resource when this job requested it
    served: set[int] = field(default_factory=set)  # members that have held and released under this fence
    contested: bool = False
    unwanted_s: float = 0.0  # uncontested time that was charged
    charged_until_s: float = 0.0
    limit_s: float = math.inf
    ends_s: float = math.inf

    def charge(self, now_s: float, *, shared: bool) -> None:
        """Charge the job for the time since the last charge.

        If other jobs are connected (``shared``), uncontested time counts as well, up to a limit: a job that fills
        another job's gaps must have used up its turn when the other job returns.
        """
        elapsed_s = now_s - self.charged_until_s
        self.charged_until_s = now_s
        if not self.contested:
            elapsed_s = min(elapsed_s, _LONGEST_GAP_S - self.unwanted_s) if shared else 0.0
            self.unwanted_s += elapsed_s
        self.job.charge(elapsed_s)


@dataclass(slots=True)
class Resource:
    """A GPU or core, with its waiting jobs and its current hold."""

    name: str
    members: set[int] = field(default_factory=set)
    queue: dict[JobKey, float] = field(default_factory=dict)  # waiting jobs, and since when each waits
    hold: Hold | None = None
    shared: bool = False  # whether members of several jobs are connected
    # Per role, the level of the active jobs' virtual time: a returning job starts at most arbiter.CREDIT_S below it.
    floors_s: dict[Role, float] = field(default_factory=lambda: dict.fromkeys(Role, 0.0))
