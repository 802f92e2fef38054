"""Decides what the posting thread of a gloo link does next.

Work that cannot wait comes first: exchanges of norms, then staging and scatter legs in the order of the calls. Gather
legs use the remaining time of the link. With the planned schedule they are posted when they are ready, the most urgent
first, and only when the link has almost nothing left to send: a gather leg in the socket buffer delays every later
scatter leg. With the paper's schedule they are posted in the order of the calls.
"""

from __future__ import annotations

import contextlib
import queue
import time
from bisect import insort
from collections import deque
from typing import Protocol

from ddp_crossover.collectives.pace import Pace
from ddp_crossover.collectives.waiters import Job

_YIELD_S = 1e-4
# Pacing is an optimization, so it must not hold a leg back for long: the backlog may be that of a dead peer.
_LONGEST_HOLD_S = 1.0


class GatherToPost(Protocol):
    """The part of a gather leg that is used here.

    Attributes:
        urgency: legs that are ready are posted in this order, smaller first; None: in the order of the calls.
        paced: whether to post the leg only when the link has almost nothing left to send.
    """

    urgency: int | None
    paced: bool

    def is_ready(self) -> bool:
        """Whether the leg can be posted."""

    def post(self) -> None:
        """Post the leg."""


class PostQueue:
    """Queue of jobs for the posting thread. Any thread may put jobs.

    Jobs go through an inbox that takes no Python lock: a signal handler may interrupt the thread that puts a job, and
    wait for a leg that the posting thread has yet to post.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._is_pacing = True
        # Used by the posting thread only.
        self._urgent: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._in_order: deque[GatherToPost] = deque()
        self._as_ready: list[GatherToPost] = []
        self._is_closed = False
        self._held: tuple[GatherToPost | None, float] = (None, 0.0)

    def put_urgent(self, job: Job) -> None:
        """Queue ``job`` ahead of everything else."""
        self._inbox.put(lambda: self._urgent.append(job))

    def put(self, job: Job) -> None:
        """Queue ``job`` after the jobs put before it, ahead of gather legs."""
        self._inbox.put(lambda: self._jobs.append(job))

    def put_gather(self, leg: GatherToPost) -> None:
        """Queue a gather leg, to be posted when its scatter leg is done and the schedule allows it."""
        self._inbox.put(lambda: self._sort_in(leg))

    def wake(self) -> None:
        """Wake the posting thread: a scatter leg has ended, so a gather leg may be ready.

        Also while it waits for the link to run dry, when it posts nothing: without these looks at the backlog a step of
        64 groups took 2% longer.
        """
        self._inbox.put(lambda: None)

    def stop_pacing(self) -> None:
        """Hold no leg back any more, because the link has failed: the remaining legs then fail at once."""
        self._is_pacing = False
        self.wake()

    def close(self) -> None:
        """Let the posting thread end after the jobs and gather legs that are ready."""
        self._inbox.put(self._close)

    def next(self) -> Job | None:
        """Wait for the next job, which may post a gather leg; None once closed. Call it on the posting thread only."""
        while True:
            while not self._inbox.empty():
                self._inbox.get()()
            for jobs in (self._urgent, self._jobs):
                if jobs:
                    return jobs.popleft()
            if self._in_order and self._in_order[0].is_ready():
                return self._in_order.popleft().post
            place = next((i for i, leg in enumerate(self._as_ready) if leg.is_ready()), None)
            wait_s = None
            if place is not None:
                leg = self._as_ready[place]
                held = leg.paced and not self._is_closed and not self._held_for_long(leg)
                wait_s = self.pace.idle_in_s(is_most_urgent=place == 0) if held else 0.0
                if not wait_s:
                    self._held = (None, 0.0)  # drop the reference: a leg keeps its buffer alive
                    return self._as_ready.pop(place).post
            if self._is_closed:
                return None
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=wait_s)()
                if self._jobs:
                    # The training thread has just queued a job. Let it leave the hook first: this thread would compete
                    # with it for the interpreter's lock and, on hosts with few cores, for a core. Without this nap a
                    # step of 360 ms took 25 ms longer on one core.
                    time.sleep(_YIELD_S)

    def _sort_in(self, leg: GatherToPost) -> None:
        if leg.urgency is None:
            self._in_order.append(leg)
        else:
            insort(self._as_ready, leg, key=lambda one: one.urgency or 0)

    def _close(self) -> None:
        self._is_closed = True

    def _held_for_long(self, leg: GatherToPost) -> bool:
        if self._held[0] is not leg:
            self._held = (leg, time.monotonic())
        return not self._is_pacing or time.monotonic() - self._held[1] > _LONGEST_HOLD_S
