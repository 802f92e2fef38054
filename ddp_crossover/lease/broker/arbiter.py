"""Decides which job may hold which resource. Pure: no sockets and no clock; callers pass the time in seconds.

A *member* is one connection: one process of one job, on one resource. All members of a job on a resource hold it
together, under one fence. Jobs take turns by weighted virtual time: the time that they are charged for holding (see
:meth:`.holds.Hold.charge`), divided by their weight. Jobs within ``AHEAD_S`` of the lowest virtual time are served
first come, first served. Fillers get a resource only while no peer waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..protocol import Role
from .holds import Hold, Job, JobKey, Member, Resource
from .ties import Ties

AHEAD_S = 0.1
"""So far a job may get ahead of another in virtual time while they take turns as they come. A training step holds for a
long time and then hardly at all: to even that out within the step would keep it waiting in every one of its gaps."""

CREDIT_S = 2 * AHEAD_S
"""So much of what it was behind a job keeps when it comes back. It is away at every end of a step: to start level each
time would take from a job of great weight the turns that it is still to have."""

EQUAL_S = 0.001
"""Who came within this of the first came together with it. Of those the one whose name sorts first goes first, so that
hosts which see the same jobs wait choose the same one."""


class Grant(NamedTuple):
    """A grant to be sent to ``member``: the number of its request and the fence to hold under."""

    member: int
    request: int
    fence: int


class View(NamedTuple):
    """The state of a resource that clients see on the state page. See :mod:`.page`."""

    fence: int
    yielding: int
    waiters: int
    pressed: int
    tied: int


class MismatchError(ValueError):
    """The members of one job disagree on its weight or role."""


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


class Arbiter:
    """The state of all resources of a host. Methods that change it return the resulting grants."""

    def __init__(self, first_fence: int, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._next_fence = first_fence
        self._jobs: dict[JobKey, Job] = {}
        self._members: dict[int, Member] = {}
        self._resources: dict[str, Resource] = {}
        self._ties: dict[str, Ties] = {}

    # ---- joining and leaving

    def join(self, member: int, key: JobKey, resource: str, role: Role, weight: float) -> None:
        """Add ``member``, a number never used before, to a job. Raises :class:`MismatchError`."""
        assert member not in self._members
        job = self._jobs.get(key) or Job(key, role, weight)
        if (job.role, job.weight) != (role, weight):
            raise MismatchError(f"job {key.name} is here as {job.role.name} of weight {job.weight}")
        self._jobs[key] = job
        res = self._resources.setdefault(resource, Resource(resource))
        self._ties.setdefault(resource, Ties())
        self._members[member] = Member(job, res)
        job.members.add(member)
        res.members.add(member)
        self._count_shared(res)

    def leave(self, member: int, now_s: float) -> list[Grant]:
        """Remove ``member``, ending its request and its part in a hold."""
        m = self._members[member]
        if m.job.members & m.resource.members == {member}:
            self._ties[m.resource.name].forget(m.job.key, now_s)
        grants = self._give_up(member, m, now_s)
        del self._members[member]
        m.job.members.discard(member)
        m.resource.members.discard(member)
        self._count_shared(m.resource, m.job)
        if not m.job.members:
            del self._jobs[m.job.key]
        if not m.resource.members:
            del self._resources[m.resource.name], self._ties[m.resource.name]
        return grants

    # ---- requests of members

    def request(self, member: int, request: int, now_s: float) -> list[Grant]:
        """Queue ``member`` for its resource. Late and duplicate requests are ignored."""
        m = self._members[member]
        if request <= m.last_request:
            return []
        m.last_request = request
        hold = m.resource.hold
        if hold is not None and member in hold.members:
            return [Grant(member, request, hold.fence)]
        m.waiting = True
        if hold is not None:
            hold.charge(now_s, shared=m.resource.shared)  # the requesting job starts level with this time
        finds_free = hold is None and not m.resource.queue
        self._enqueue(m, now_s)
        return self._arbitrate(m.resource, now_s, finds_free)

    def release(self, member: int, fence: int, again: int, now_s: float) -> list[Grant]:
        """End the hold of ``member`` under ``fence``, and queue it again as request ``again`` unless that is 0.

        The next job is then chosen by virtual time and may be the same one. With a stale fence nothing is released, but
        ``again`` is still queued.
        """
        m = self._members[member]
        hold = m.resource.hold
        if hold is not None and hold.fence == fence and member in hold.members:
            if again > m.last_request:
                m.last_request = again
                m.waiting = True
                # Queue it later than EQUAL_S: it must come after every waiting job, not tie with the last one.
                self._enqueue(m, now_s + 2 * EQUAL_S)
            self._drop(hold, member, m.resource, now_s)
            return self._arbitrate(m.resource, now_s)
        return self.request(member, again, now_s) if again else []

    def cancel(self, member: int, request: int, now_s: float) -> list[Grant]:
        """Withdraw the requests of ``member`` up to number ``request``, whether granted or not."""
        m = self._members[member]
        if request < m.last_request:
            return []
        m.last_request = request
        return self._give_up(member, m, now_s)

    # ---- time

    def evict(self, resource: str, now_s: float) -> list[Grant]:
        """End the hold on ``resource`` without the holder's consent. Its fence is stale from then on."""
        res = self._resources[resource]
        if res.hold is None:
            return []
        for member in list(res.hold.members):
            self._drop(res.hold, member, res, now_s)
        return self._arbitrate(res, now_s)

    def overdue(self, now_s: float) -> list[str]:
        """Resources whose hold has reached its limit and must be evicted."""
        return [r.name for r in self._resources.values() if r.hold is not None and r.hold.ends_s <= now_s]

    def kept_free(self) -> dict[str, float]:
        """Resources kept free although a job waits, with the time at which to call :meth:`give`. See :mod:`.ties`."""
        waits = {name: ties.standing_back for name, ties in self._ties.items()}
        return {name: wait.until_s for name, wait in waits.items() if wait is not None}

    def give(self, resource: str, now_s: float) -> list[Grant]:
        """Grant a resource whose time in :meth:`kept_free` is over."""
        return self._arbitrate(self._resources[resource], now_s)

    # ---- queries

    def view(self, resource: str) -> View:
        """The state to show on the page; an unknown resource counts as free."""
        res = self._resources.get(resource)
        if res is None:
            return View(0, 0, 0, 0, 0)
        hold = res.hold
        tied = int(self._ties[resource].tied)
        if hold is None:
            return View(0, 0, len(res.queue), 0, tied)
        waiters = len(res.queue) - (hold.job.key in res.queue)
        yielding = hold.fence if hold.job.role is Role.FILLER and self._peer_waits(res) else 0
        return View(hold.fence, yielding, waiters, int(hold.contested), tied)

    def holders(self, resource: str) -> frozenset[int]:
        """Members that currently hold the resource."""
        hold = self._resources[resource].hold
        return frozenset(hold.members) if hold is not None else frozenset()

    def contended(self) -> list[str]:
        """Resources for which at least one job waits."""
        return [r.name for r in self._resources.values() if r.queue]

    def jobs_of(self, uid: int) -> set[JobKey]:
        return {key for key in self._jobs if key.uid == uid}

    def resources(self) -> list[str]:
        return list(self._resources)

    def queue(self, resource: str) -> list[JobKey]:
        """Jobs that wait for the resource, in no particular order."""
        return list(self._resources[resource].queue)

    def holding_job(self, resource: str) -> JobKey | None:
        res = self._resources.get(resource)
        return res.hold.job.key if res is not None and res.hold is not None else None

    def virtual_s(self, key: JobKey) -> float:
        """The job's virtual time in seconds: the weighted time that it has been charged for."""
        return self._jobs[key].virtual_s

    # ---- internals

    def _count_shared(self, res: Resource, *gone: Job) -> None:
        """Recount, after members of ``res`` changed, on how many resources its jobs compete with other jobs."""
        jobs = {self._members[member].job.key: self._members[member].job for member in res.members}
        res.shared = len(jobs) > 1
        for job in (*jobs.values(), *gone):
            places = {m.resource.name: m.resource for m in map(self._members.__getitem__, job.members)}
            job.shared_resources = sum(place.shared for place in places.values())

    def _enqueue(self, m: Member, since_s: float) -> None:
        res, job = m.resource, m.job
        if job.key in res.queue:
            return
        # A job that was away starts level with the active jobs, except for a lag of at most CREDIT_S.
        rivals = [self._jobs[key] for key in res.queue]
        if res.hold is not None:
            rivals.append(res.hold.job)
        virtual_s = [rival.virtual_s for rival in rivals if rival.role is job.role]
        if virtual_s:
            res.floors_s[job.role] = max(res.floors_s[job.role], min(virtual_s))
        if res.hold is None or res.hold.job is not job:
            job.virtual_s = max(job.virtual_s, res.floors_s[job.role] - CREDIT_S)
        res.queue[job.key] = since_s

    def _give_up(self, member: int, m: Member, now_s: float) -> list[Grant]:
        """Remove ``member`` from the queue and from the hold."""
        res = m.resource
        if m.waiting:
            m.waiting = False
            if not self._waiting_members(m.job, res):
                del res.queue[m.job.key]
        if res.hold is not None and member in res.hold.members:
            self._drop(res.hold, member, res, now_s)
        return self._arbitrate(res, now_s)

    def _drop(self, hold: Hold, member: int, res: Resource, now_s: float) -> None:
        hold.members.discard(member)
        hold.served.add(member)
        if not hold.members:
            hold.charge(now_s, shared=res.shared)
            res.hold = None
            if hold.found_free:
                rivals = {key: since_s for key, since_s in res.queue.items() if self._jobs[key].role is hold.job.role}
                self._ties[res.name].note_hold(hold.job.key, rivals, hold.start_s, now_s)

    def _arbitrate(self, res: Resource, now_s: float, finds_free: bool = False) -> list[Grant]:
        hold = res.hold
        if hold is None:
            job = self._next(res, now_s, finds_free)
            if job is None:
                return []
            hold = res.hold = self._start(res, job, now_s, finds_free)
        else:
            hold.charge(now_s, shared=res.shared)
        hold.contested = self._is_contested(res, hold)
        waiting = self._waiting_members(hold.job, res)
        # While another job waits, admit each member once per fence: alternating ranks would never end the hold.
        admitted = waiting - hold.served if hold.contested else waiting
        grants = []
        for member in sorted(admitted):
            m = self._members[member]
            m.waiting = False
            hold.members.add(member)
            grants.append(Grant(member, m.last_request, hold.fence))
        if admitted == waiting:
            res.queue.pop(hold.job.key, None)
        self._limit(res, hold, now_s)
        return grants

    def _start(self, res: Resource, job: Job, now_s: float, found_free: bool) -> Hold:
        fence = self._next_fence
        self._next_fence += 1
        res.floors_s[job.role] = max(res.floors_s[job.role], job.virtual_s)
        return Hold(job, fence, set(), start_s=now_s, found_free=found_free, charged_until_s=now_s)

    def _next(self, res: Resource, now_s: float, finds_free: bool) -> Job | None:
        """The job to be granted ``res``; None if no job waits or the resource is kept free for another job."""
        ties = self._ties[res.name]
        if not res.queue:
            ties.stop(now_s)
            return None
        key = ties.choose(self._choose(res).key, res.queue, finds_free, now_s)
        return self._jobs[key] if key is not None else None

    def _choose(self, res: Resource) -> Job:
        jobs = [self._jobs[key] for key in res.queue]
        if len(jobs) == 1:  # the usual case; a shortcut, because hand-offs wait for this method
            return jobs[0]
        first_role = min(job.role for job in jobs)
        jobs = [job for job in jobs if job.role is first_role]
        lowest_s = min(job.virtual_s for job in jobs)
        jobs = [job for job in jobs if job.virtual_s <= lowest_s + AHEAD_S]
        first_s = min(res.queue[job.key] for job in jobs)
        together = [job for job in jobs if res.queue[job.key] <= first_s + EQUAL_S]
        return min(together, key=lambda job: (job.key.name, job.key.uid))

    def _is_contested(self, res: Resource, hold: Hold) -> bool:
        """Whether another job presses the holder. A waiting filler does not press a peer: it waits for a gap."""
        for key in res.queue:  # noqa: SIM110 - any() would add a generator frame to every hand-off
            if key != hold.job.key and self._jobs[key].role <= hold.job.role:
                return True
        return False

    def _limit(self, res: Resource, hold: Hold, now_s: float) -> None:
        limit_s = math.inf
        if hold.contested:
            yields = hold.job.role is Role.FILLER and self._peer_waits(res)
            limit_s = self.limits.filler_s if yields else self.limits.hold_s
        if limit_s != hold.limit_s:
            hold.limit_s = limit_s
            hold.ends_s = now_s + limit_s

    def _peer_waits(self, res: Resource) -> bool:
        return any(self._jobs[key].role is Role.PEER for key in res.queue)

    def _waiting_members(self, job: Job, res: Resource) -> set[int]:
        return {member for member in job.members & res.members if self._members[member].waiting}
