"""The fairness rule: which waiting job goes next, and what a hold costs it. Pure; callers pass the time in seconds.

Jobs take turns by weighted virtual time: the time that they are charged for holding, divided by their weight. Jobs
within ``AHEAD_S`` of the lowest virtual time are served first come, first served. Peers go before fillers. Another rule
changes this file, and :mod:`.jobs` or :mod:`.holds` if it must remember something else.
"""

from __future__ import annotations

from .holds import Hold, Resource, Waiting
from .jobs import Job

AHEAD_S = 0.1
"""While jobs take turns in the order in which they come, one may get ahead of another by this much virtual time.

A training step holds the resource for a long time in backward and for short times in forward. Evening that out within
the step would make the job wait in every gap of its forward.
"""

CREDIT_S = 2 * AHEAD_S
"""A job that comes back may be behind the active jobs by at most this much virtual time.

A training job is away at the end of every step. Without this credit, a job of large weight would lose the turns that it
is owed each time.
"""

EQUAL_S = 0.001
"""Requests at most this long after the first one count as simultaneous, and the job whose name sorts first goes first.

Hosts that see the same jobs wait then choose the same job.
"""

_LONGEST_UNCONTESTED_S = 0.1
"""One hold is charged for at most this much uncontested time.

A longer hold does not fill another job's gap. Charging for all of it could put the job hours behind when another job
arrives.
"""


def next_job(waiting: list[Waiting]) -> Job:
    """The job to be granted the resource next. ``waiting`` must not be empty."""
    if len(waiting) == 1:  # the usual case; a shortcut, because hand-offs wait for this function
        return waiting[0].job
    first_role = min(each.job.role for each in waiting)
    waiting = [each for each in waiting if each.job.role is first_role]
    lowest_s = min(each.job.virtual_s for each in waiting)
    waiting = [each for each in waiting if each.job.virtual_s <= lowest_s + AHEAD_S]
    first_s = min(each.since_s for each in waiting)
    simultaneous = [each.job for each in waiting if each.since_s <= first_s + EQUAL_S]
    return min(simultaneous, key=lambda job: (job.key.name, job.key.uid))


def start_waiting(res: Resource, job: Job) -> None:
    """Adjust the virtual time of ``job``, which is about to join the queue.

    A job that was away starts level with the active jobs of its role, except for a lag of at most ``CREDIT_S``.
    """
    active = [waiting.job for waiting in res.queue.values()]
    if res.hold is not None:
        active.append(res.hold.job)
    virtual_s = [other.virtual_s for other in active if other.role is job.role]
    if virtual_s:
        res.floors_s[job.role] = max(res.floors_s[job.role], min(virtual_s))
    if res.hold is None or res.hold.job is not job:
        job.start_level_with(res.floors_s[job.role] - CREDIT_S)


def start_holding(res: Resource, job: Job) -> None:
    """Note that ``job`` is granted the resource."""
    res.floors_s[job.role] = max(res.floors_s[job.role], job.virtual_s)


def charge(res: Resource, hold: Hold, now_s: float) -> None:
    """Charge the holding job for the time since the last charge.

    If several jobs are connected, uncontested time counts as well, up to a limit: a job that fills another job's gaps
    must have used up its turn when the other job returns.
    """
    elapsed_s = hold.charge_until(now_s)
    if not hold.contested:
        elapsed_s = min(elapsed_s, _LONGEST_UNCONTESTED_S - hold.uncontested_s) if res.shared else 0.0
        hold.charge_uncontested(elapsed_s)
    hold.job.charge(elapsed_s)
