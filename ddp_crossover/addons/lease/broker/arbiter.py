"""Decides which job may hold which resource. Pure: no sockets and no clock; callers pass the time in seconds.

A *member* is one connection: one process of one job, on one resource. All members of a job on a resource hold it
together, under one fence. This module knows when a hold begins and ends. Which waiting job is next is decided by
:mod:`.fairness`, and whether a free resource is reserved for a job that is about to come by :mod:`.ties`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..protocol import Role
from ..shared_memory import NOBODY, ResourceState, tag_of
from . import fairness, succession
from .holds import Hold, Limits, Member, Resource, Waiting, Wish
from .jobs import Job, JobKey


class Grant(NamedTuple):
    """A grant to be sent to ``member``: the number of its request and the fence to hold under."""

    member: int
    request: int
    fence: int


class MismatchError(ValueError):
    """The members of one job disagree on its weight or role."""


class Arbiter:
    """The state of all resources of a host. Methods that change it return the resulting grants."""

    def __init__(self, first_fence: int, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._next_fence = first_fence
        self._jobs: dict[JobKey, Job] = {}
        self._members: dict[int, Member] = {}
        self._resources: dict[str, Resource] = {}

    # ---- joining and leaving

    def join(self, member: int, key: JobKey, resource: str, role: Role, weight: float) -> None:
        """Add ``member``, a number never used before, to a job. Raises :class:`MismatchError`."""
        assert member not in self._members
        job = self._jobs.get(key) or Job(key, role, weight)
        if (job.role, job.weight) != (role, weight):
            raise MismatchError(
                f"job {key.name!r} is already connected as a {job.role.name.lower()} of weight {job.weight}"
            )
        self._jobs[key] = job
        res = self._resources.setdefault(resource, Resource(resource))
        self._members[member] = Member(member, job, res)
        res.members.add(self._members[member])
        self._count_shared(res)

    def leave(self, member: int, now_s: float) -> list[Grant]:
        """Remove ``member``, ending its request and its part in a hold."""
        m = self._members[member]
        job, res = m.job, m.resource
        if not any(other.job is job for other in res.members - {m}):
            res.ties.forget(job.key, now_s)
        grants = self._give_up(m, now_s)
        del self._members[member]
        res.members.discard(m)
        self._count_shared(res, job)
        if not any(other.job is job for other in self._members.values()):
            del self._jobs[job.key]
        if not res.members:
            del self._resources[res.name]
        return grants

    # ---- requests of members

    def request(self, member: int, request: int, now_s: float) -> list[Grant]:
        """Queue ``member`` for its resource. Late and duplicate requests are ignored."""
        m = self._members[member]
        if request <= m.last_request:
            return []
        m.has_asked(request)
        res, hold = m.resource, m.resource.hold
        if hold is not None and m.wish is Wish.HOLDING:
            return [Grant(member, request, hold.fence)]
        m.waits()
        if hold is not None:
            fairness.charge(res, hold, now_s)  # the requesting job starts level with this time
        finds_free = hold is None and not res.queue
        self._enqueue(m, now_s)
        return self._arbitrate(res, now_s, finds_free)

    def release(self, member: int, fence: int, again: int, now_s: float, handed: int = 0) -> list[Grant]:
        """End the hold of ``member`` under ``fence``, and queue it again as request ``again`` unless that is 0.

        The next job is the one to which ``member`` has handed the resource under the promised fence ``handed``.
        Otherwise it is chosen by virtual time and may be the same one. With a stale fence nothing is released, but
        ``again`` is still queued.
        """
        m = self._members[member]
        hold = m.resource.hold
        if m.wish is not Wish.HOLDING or hold is None or hold.fence != fence:
            return self.request(member, again, now_s) if again else []
        now_s = max(now_s, hold.charged_until_s)  # a client may name a time in the past
        asks_again = again > m.last_request
        if asks_again:
            m.has_asked(again)
            # Queue it later than EQUAL_S: it must come after every waiting job, not tie with the last one.
            self._enqueue(m, now_s + 2 * fairness.EQUAL_S)
        self._stop_holding(m, hold, now_s, asks_again=asks_again)
        return self._arbitrate(m.resource, now_s, handed=handed)

    def cancel(self, member: int, request: int, now_s: float) -> list[Grant]:
        """Withdraw the requests of ``member`` up to number ``request``, whether granted or not."""
        m = self._members[member]
        if request < m.last_request:
            return []
        m.has_asked(request)
        return self._give_up(m, now_s)

    # ---- time

    def evict(self, resource: str, now_s: float) -> list[Grant]:
        """End the hold on ``resource`` without the holder's consent. Its fence is stale from then on."""
        res = self._resources[resource]
        hold = res.hold
        if hold is None:
            return []
        for m in res.members_of(hold.job, Wish.HOLDING):
            self._stop_holding(m, hold, now_s)
        return self._arbitrate(res, now_s)

    def overdue(self, now_s: float) -> list[str]:
        """Resources whose hold has reached its limit and must be evicted."""
        return [r.name for r in self._resources.values() if r.hold is not None and r.hold.ends_s <= now_s]

    def reserved(self) -> dict[str, float]:
        """Free resources that are reserved although a job waits, with the time at which to end the reservation."""
        reservations = {name: res.ties.reservation for name, res in self._resources.items()}
        return {name: each.until_s for name, each in reservations.items() if each is not None}

    def end_reservation(self, resource: str, now_s: float) -> list[Grant]:
        """Grant a resource whose time in :meth:`reserved` is over."""
        return self._arbitrate(self._resources[resource], now_s)

    def renew_promise(self, resource: str) -> bool:
        """Follow virtual times, which also change with what jobs hold elsewhere; return whether the promise changed."""
        res = self._resources[resource]
        hold = res.hold
        if hold is None or not any(waiting.job.shared_resources > 1 for waiting in res.queue.values()):
            return False
        before = hold.promise
        succession.promise_next(res, hold, self._new_fence)
        return hold.promise != before

    # ---- queries

    def view(self, resource: str) -> ResourceState:
        """The state to show on the page; an unknown resource counts as free."""
        res = self._resources.get(resource)
        if res is None:
            return ResourceState()
        hold = res.hold
        tied = int(res.ties.tied)
        if hold is None:
            return ResourceState(waiters=len(res.queue), tied=tied)
        waiters = len(res.queue) - (hold.job.key in res.queue)
        yielding = hold.fence if hold.job.role is Role.FILLER and res.peer_waits else 0
        tag = tag_of(hold.job.key.name)
        successor = hold.promise.as_successor() if hold.promise is not None else NOBODY
        return ResourceState(hold.fence, yielding, waiters, int(hold.contested), tied, tag, successor)

    def may_be_handed_over(self) -> list[tuple[str, int, int]]:
        """Resource, holder and fence of all holds that their holders might have handed over."""
        held = [(name, res, res.hold) for name, res in self._resources.items() if res.hold is not None]
        return [(name, each.holder.number, hold.fence) for name, res, hold in held for each in res.promises.values()]

    def handover(self, resource: str) -> tuple[int, int] | None:
        """The member that holds the resource, and the one that it may hand it to."""
        res = self._resources.get(resource)
        promise = res.hold.promise if res is not None and res.hold is not None else None
        return (promise.holder.number, promise.member.number) if promise is not None else None

    def holders(self, resource: str) -> frozenset[int]:
        return frozenset(m.number for m in self._resources[resource].members if m.wish is Wish.HOLDING)

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

    # ---- internals

    def _count_shared(self, res: Resource, *gone: Job) -> None:
        """Recount, after members of ``res`` changed, on how many resources its jobs compete with other jobs."""
        jobs = {m.job.key: m.job for m in res.members}
        res.is_shared_by(len(jobs))
        jobs |= {job.key: job for job in gone}
        used: dict[JobKey, set[str]] = {key: set() for key in jobs}
        for m in self._members.values():
            if m.job.key in used:
                used[m.job.key].add(m.resource.name)
        for key, job in jobs.items():
            job.competes_on(sum(self._resources[name].shared for name in used[key]))

    def _enqueue(self, m: Member, since_s: float) -> None:
        res, job = m.resource, m.job
        if job.key not in res.queue:
            fairness.start_waiting(res, job)
            res.queue[job.key] = Waiting(job, since_s)

    def _give_up(self, m: Member, now_s: float) -> list[Grant]:
        """Remove ``m`` from the queue or from the hold."""
        res = m.resource
        if m.wish is Wish.WAITING:
            m.idles()
            if not res.members_of(m.job, Wish.WAITING):
                del res.queue[m.job.key]
        elif m.wish is Wish.HOLDING and res.hold is not None:
            self._stop_holding(m, res.hold, now_s)
        return self._arbitrate(res, now_s)

    def _stop_holding(self, m: Member, hold: Hold, now_s: float, asks_again: bool = False) -> None:
        """End the part of ``m`` in ``hold``. The last member ends the hold."""
        res = m.resource
        if asks_again:
            m.waits()
        else:
            m.idles()
        hold.served.add(m)
        if res.members_of(hold.job, Wish.HOLDING):
            return
        fairness.charge(res, hold, now_s)
        res.end_hold()
        if hold.found_free:
            waiting = res.queue.items()
            rivals = {key: each.since_s for key, each in waiting if each.job.role is hold.job.role}
            res.ties.note_hold(hold.job.key, rivals, hold.start_s, now_s)

    def _arbitrate(self, res: Resource, now_s: float, finds_free: bool = False, handed: int = 0) -> list[Grant]:
        """Start the next hold if the resource is free, and return grants for members that may join the hold now."""
        hold = res.hold
        if hold is None:
            job = self._next_job(res, now_s, finds_free, handed)
            if job is None:
                return []
            hold = self._start(res, job, now_s, finds_free)
        else:
            fairness.charge(res, hold, now_s)
        hold.note_contested(res.presses(hold))
        waiting = res.members_of(hold.job, Wish.WAITING)
        # While another job waits, admit each member once per fence: alternating ranks would never end the hold.
        admitted = waiting - hold.served if hold.contested else waiting
        grants = []
        for m in sorted(admitted, key=lambda m: m.number):
            m.holds()
            grants.append(Grant(m.number, m.last_request, hold.fence))
        if admitted == waiting:
            res.queue.pop(hold.job.key, None)
        self._limit(res, hold, now_s)
        succession.promise_next(res, hold, self._new_fence)
        return grants

    def _start(self, res: Resource, job: Job, now_s: float, found_free: bool) -> Hold:
        fence = succession.promised_fence(res, job) or self._new_fence()
        fairness.start_holding(res, job)
        hold = Hold(job, fence, start_s=now_s, found_free=found_free, charged_until_s=now_s)
        res.begin(hold)
        return hold

    def _new_fence(self) -> int:
        fence = self._next_fence
        self._next_fence += 1
        return fence

    def _next_job(self, res: Resource, now_s: float, finds_free: bool, handed: int) -> Job | None:
        """The job to be granted ``res``; None if no job waits or the resource is reserved for another job."""
        if not res.queue:
            res.ties.end_reservation(now_s)
            return None
        first = succession.handed_to(res, handed) or fairness.next_job(list(res.queue.values()))
        key = res.ties.choose(first.key, res.queue, finds_free, now_s)
        return self._jobs[key] if key is not None else None

    def _limit(self, res: Resource, hold: Hold, now_s: float) -> None:
        """Start, change or lift the limit of ``hold``, depending on the jobs that wait."""
        limit_s = math.inf
        if hold.contested:
            yields = hold.job.role is Role.FILLER and res.peer_waits
            limit_s = self._limits.filler_s if yields else self._limits.hold_s
        hold.end_within(limit_s, now_s)
