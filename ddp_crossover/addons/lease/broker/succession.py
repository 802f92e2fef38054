"""Promises a held resource to the job that is next, so that its holder may hand it over by itself. Pure.

A promise says which request is next, and under which fence. It is made while the resource is held, and holds if the
holder releases it: then the arbiter would choose the same job. Whatever changes that choice makes another promise. A
holder that has handed the resource over just before is believed, since the other job has begun.
"""

from __future__ import annotations

from collections.abc import Callable

from . import fairness
from .holds import Hold, Promise, Resource, Waiting, Wish
from .jobs import Job

_LAST_S = float("inf")


def promise_next(res: Resource, hold: Hold, new_fence: Callable[[], int]) -> None:
    """Decide to whom the holder of ``res`` may hand it over. The promise is None if nobody can be told beforehand."""
    hold.promise_to(None)
    if not res.queue:
        return
    queue = list(res.queue.values())
    job = fairness.next_job(queue)
    # Jobs of other users do not trust each other, and all members of a job would have to be told.
    waiting = res.members_of(job, Wish.WAITING)
    if job is hold.job or job.key.uid != hold.job.key.uid or len(waiting) != 1:
        return
    holding = res.members_of(hold.job, Wish.HOLDING)
    if len(holding) != 1:
        return
    [member], [holder] = waiting, holding
    known = res.promises.get(job.key)
    fence = known.fence if known is not None and known.member is member and known.stands else new_fence()
    # While the job holds, its virtual time grows: if it comes last now, it will at the end of its hold.
    last = hold.job.key not in res.queue and fairness.next_job([*queue, Waiting(hold.job, _LAST_S)]) is job
    res.promises[job.key] = Promise(member, member.last_request, fence, holder, last)
    hold.promise_to(res.promises[job.key])


def promised_fence(res: Resource, job: Job) -> int:
    """The fence under which ``job`` was promised ``res``, 0 if it was not or has cancelled that request."""
    promise = res.promises.get(job.key)
    return promise.fence if promise is not None and promise.stands else 0


def handed_to(res: Resource, fence: int) -> Job | None:
    """The job to which ``res`` was handed over under the promised ``fence``; None if that promise does not stand."""
    for promise in res.promises.values():
        if promise.fence == fence and promise.stands:
            return promise.member.job
    return None
