"""What the arbiter remembers of jobs, members, resources and holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from .protocol import Role

# What lasts longer is no gap between a job's turns, and must not set it back by hours once another one comes.
_LONGEST_GAP_S = 0.1


class JobKey(NamedTuple):
    """Two users' jobs of the same name are two jobs."""

    uid: int
    name: str


@dataclass(slots=True)
class Job:
    """A job, wherever it has members."""

    key: JobKey
    role: Role
    weight: float
    virtual_s: float = 0.0
    members: set[int] = field(default_factory=set)
    shared_resources: int = 0  # those of its resources that other jobs are on, too

    def charge(self, held_s: float) -> None:
        """Its virtual time is the mean over its resources: a job on four GPUs is not four times as greedy."""
        self.virtual_s += held_s / (self.weight * max(1, self.shared_resources))


@dataclass(slots=True)
class Member:
    """One connection: a process of a job, on one resource."""

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
    found_free: bool = False  # nobody had it or waited for it when this job came
    served: set[int] = field(default_factory=set)  # members that have held and released under this fence
    contested: bool = False
    unwanted_s: float = 0.0  # charged for while nobody waited
    charged_until_s: float = 0.0
    limit_s: float = math.inf
    ends_s: float = math.inf

    def charge(self, now_s: float, *, shared: bool) -> None:
        """Bring the job's virtual time up to date.

        Where other jobs are connected, time in which none of them waits counts as well, up to a limit: a job that fills
        another one's gaps has had its turn when that one comes back.
        """
        elapsed_s = now_s - self.charged_until_s
        self.charged_until_s = now_s
        if not self.contested:
            elapsed_s = min(elapsed_s, _LONGEST_GAP_S - self.unwanted_s) if shared else 0.0
            self.unwanted_s += elapsed_s
        self.job.charge(elapsed_s)


@dataclass(slots=True)
class Resource:
    """A GPU: who wants it, who has it."""

    name: str
    members: set[int] = field(default_factory=set)
    queue: dict[JobKey, float] = field(default_factory=dict)  # waiting jobs: since when
    hold: Hold | None = None
    shared: bool = False  # by members of several jobs
    # Virtual time at which a job of that role starts that was away.
    floors_s: dict[Role, float] = field(default_factory=lambda: dict.fromkeys(Role, 0.0))
