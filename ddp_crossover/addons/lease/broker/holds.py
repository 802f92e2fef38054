"""The arbiter's records of members, holds and resources, and how long a hold may last."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from ..protocol import Role
from ..shared_memory import Successor
from .jobs import Job, JobKey
from .ties import Ties


class Wish(Enum):
    """What a member wants of its resource."""

    IDLE = auto()  # nothing: it has not requested the resource, or has released it or cancelled its request
    WAITING = auto()  # it has sent REQUEST, or RELEASE with a new request
    HOLDING = auto()  # it was sent GRANT


@dataclass(slots=True, eq=False)
class Member:
    """One connection of one process of a job, on one resource."""

    number: int
    job: Job
    resource: Resource
    last_request: int = 0
    wish: Wish = Wish.IDLE

    def has_asked(self, request: int) -> None:
        """Note its latest request; earlier ones are void."""
        self.last_request = request

    def waits(self) -> None:
        self.wish = Wish.WAITING

    def holds(self) -> None:
        self.wish = Wish.HOLDING

    def idles(self) -> None:
        self.wish = Wish.IDLE


class Promise(NamedTuple):
    """``request`` of ``member`` is granted under ``fence`` once ``holder`` has released the resource."""

    member: Member
    request: int
    fence: int
    holder: Member
    even_if_again: bool  # also if the holder's job requests the resource again at once

    @property
    def stands(self) -> bool:
        """Whether ``member`` still waits with this request."""
        return self.member.wish is Wish.WAITING and self.member.last_request == self.request

    def as_successor(self) -> Successor:
        """What clients see of it on the state page."""
        return Successor(self.fence, self.member.number, self.request, self.even_if_again)


@dataclass(frozen=True)
class Limits:
    """How long a hold may last, in seconds, once another job waits for its resource.

    Attributes:
        hold_s: limit for any hold, after which the resource goes to the next job and the fence is stale. A filler that
            waits for a peer does not start this limit.
        filler_s: limit for a filler's hold once a peer waits.
    """

    hold_s: float = 10.0
    filler_s: float = 0.1


@dataclass(slots=True, eq=False)
class Hold:
    """A job's turn on a resource. It lasts until none of the job's members is HOLDING."""

    job: Job
    fence: int
    start_s: float
    found_free: bool  # no job held or waited for the resource when this job requested it
    charged_until_s: float
    served: set[Member] = field(default_factory=set)  # members that have held and released under this fence
    contested: bool = False  # another job waits that is entitled to a turn
    uncontested_s: float = 0.0  # uncontested time that was charged
    limit_s: float = math.inf
    ends_s: float = math.inf
    promise: Promise | None = None  # for the hold that follows this one, see succession.py

    def charge_until(self, now_s: float) -> float:
        """Seconds since the last charge; the next one begins now."""
        elapsed_s, self.charged_until_s = now_s - self.charged_until_s, now_s
        return elapsed_s

    def charge_uncontested(self, elapsed_s: float) -> None:
        self.uncontested_s += elapsed_s

    def end_within(self, limit_s: float, now_s: float) -> None:
        """Give it so many seconds from now on, unless they are what it has been given."""
        if limit_s != self.limit_s:
            self.limit_s, self.ends_s = limit_s, now_s + limit_s

    def note_contested(self, contested: bool) -> None:
        self.contested = contested

    def promise_to(self, promise: Promise | None) -> None:
        self.promise = promise


class Waiting(NamedTuple):
    """A job in the queue of a resource, and since when it waits."""

    job: Job
    since_s: float


@dataclass(slots=True, eq=False)
class Resource:
    """A GPU or core, with its waiting jobs and its current hold."""

    name: str
    members: set[Member] = field(default_factory=set)
    queue: dict[JobKey, Waiting] = field(default_factory=dict)
    hold: Hold | None = None
    promises: dict[JobKey, Promise] = field(default_factory=dict)  # of the current hold: the last one for each job
    ties: Ties = field(default_factory=Ties)
    shared: bool = False  # whether members of several jobs are connected
    # Per role, a lower bound on the virtual time of active jobs, see fairness.start_waiting().
    floors_s: dict[Role, float] = field(default_factory=lambda: dict.fromkeys(Role, 0.0))

    def begin(self, hold: Hold) -> None:
        """Begin a hold; what was promised before is void."""
        self.promises.clear()
        self.hold = hold

    def end_hold(self) -> None:
        self.hold = None

    def is_shared_by(self, jobs: int) -> None:
        self.shared = jobs > 1

    def members_of(self, job: Job, wish: Wish) -> set[Member]:
        return {member for member in self.members if member.job is job and member.wish is wish}

    def presses(self, hold: Hold) -> bool:
        """Whether another job presses the holder. A waiting filler does not press a peer: it waits for a gap."""
        for waiting in self.queue.values():  # noqa: SIM110 - any() would add a generator frame to every hand-off
            if waiting.job is not hold.job and waiting.job.role <= hold.job.role:
                return True
        return False

    @property
    def peer_waits(self) -> bool:
        return any(waiting.job.role is Role.PEER for waiting in self.queue.values())
