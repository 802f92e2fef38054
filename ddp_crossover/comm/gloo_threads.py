"""The threads of a gloo link. Gloo's calls block, and the training thread must not: it waits on Python events only.

One thread stages gradients and posts messages; one adds up received slices; a few wait for gather legs and small
exchanges, each for one, so that no wait delays noticing the end of another. Second rounds have a thread that adds up
and a few that wait of their own. They know nothing about legs, only jobs.

[Note: what is posted next]
Work that cannot wait comes first: exchanges of norms, then staging and scatter legs in the order of the calls. Gather
legs use the remaining time of the link. With `schedule="auto"` they have an urgency: posted when ready, the most urgent
first, and only when the link has almost nothing left to send: a gather leg in the socket buffer delays every later
scatter leg. With `"dear"` they have none, and are posted in the order of the calls.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import queue
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ddp_crossover.comm.leg import Failures, Latch
from ddp_crossover.comm.pace import Pace, SocketBacklog
from ddp_crossover.own_threads import start_thread

Job = Callable[[], None]


class Waiters:
    """Runs each blocking job at once, on a thread of its own; threads are reused.

    Args:
        limit: maximum number of threads; further jobs are queued.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unclaimed = 0  # idle threads minus queued jobs
        self.threads: list[threading.Thread] = []

    def run(self, job: Job) -> None:
        """Run ``job``, which must not raise, on one of the threads."""
        with self._lock:
            self._unclaimed -= 1
            if self._unclaimed < 0 and len(self.threads) < self._limit:
                self._unclaimed += 1
                self.threads.append(start_thread("wait", self._work))
        self._jobs.put(job)

    def close(self) -> list[threading.Thread]:
        """Let the threads end after the jobs given so far; returns the threads, to be joined."""
        with self._lock:
            threads, self.threads = self.threads, []
        for _ in threads:
            self._jobs.put(None)
        return threads

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # else the objects it refers to stay alive until the next job
            with self._lock:
                self._unclaimed += 1


_YIELD_S = 1e-4
# Pacing is an optimization, so it must not hold a leg back for long: the backlog may be that of a dead peer.
_LONGEST_HOLD_S = 1.0


class GatherToPost(Protocol):
    """The part of a gather leg that is used here.

    Attributes:
        urgency: legs that are ready are posted in this order, smaller first; None: in the order of the calls.
        paced: whether to post the leg only when the link has almost nothing left to send.
        ready: set when the leg can be posted.
    """

    urgency: int | None
    paced: bool
    ready: Latch

    def post(self) -> None:
        """Post the leg."""


_by_urgency: Callable[[GatherToPost], int] = operator.attrgetter("urgency")


class PostQueue:
    """Queue of jobs for the posting thread. Any thread may put jobs.

    That takes no Python lock: a signal handler may interrupt the thread that puts a job, and wait for a leg that the
    posting thread has yet to post. What is put is appended to a deque, then the thread is woken. If a signal handler
    raises in between, the thread comes to it with the next wake.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._urgent: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._gathers: deque[GatherToPost] = deque()
        self._readied: deque[Latch] = deque()
        self._is_pacing = True
        self._is_closed = False
        # Used by the posting thread only. Legs with an urgency are either not ready, or ready and in their order.
        self._in_order: deque[GatherToPost] = deque()
        self._not_ready: dict[Latch, GatherToPost] = {}
        self._as_ready: list[GatherToPost] = []
        self._held: tuple[GatherToPost | None, float] = (None, 0.0)

    def put_urgent(self, job: Job) -> None:
        """Queue ``job`` ahead of everything else."""
        self._urgent.append(job)
        self._wakes.put(None)

    def put(self, job: Job) -> None:
        """Queue ``job`` after the jobs put before it, ahead of gather legs."""
        self._jobs.append(job)
        self._wakes.put(None)

    def put_gather(self, leg: GatherToPost) -> None:
        """Queue a gather leg, to be posted when its scatter leg is done and the schedule allows it."""
        self._gathers.append(leg)
        self._wakes.put(None)

    def note_ready(self, ready: Latch) -> None:
        """Wake the posting thread: a scatter leg has ended, so the gather leg behind it, if it was put, is ready.

        Also while it waits for the link to run dry, when it posts nothing: without these looks at the backlog a step of
        64 groups took 2% longer.
        """
        self._readied.append(ready)
        self._wakes.put(None)

    def stop_pacing(self) -> None:
        """Hold no leg back any more, because the link has failed: the remaining legs then fail at once."""
        self._is_pacing = False
        self._wakes.put(None)

    def close(self) -> None:
        """Let the posting thread end after the jobs and gather legs that are ready."""
        self._is_closed = True
        self._wakes.put(None)

    def next(self) -> Job | None:
        """Wait for the next job, which may post a gather leg; None once closed. Call it on the posting thread only."""
        wakes, urgent, jobs = self._wakes, self._urgent, self._jobs
        while True:
            # Before a look at what was put: what is put after that look leaves a wake.
            while not wakes.empty():
                wakes.get()
            is_closed = self._is_closed
            if urgent:
                return urgent.popleft()
            if jobs:
                return jobs.popleft()
            if self._gathers or self._readied:
                self._sort_in()
            if self._in_order and self._in_order[0].ready.is_set:
                return self._in_order.popleft().post
            wait_s = None
            if self._as_ready:
                wait_s = self._held_for_s(self._as_ready[0])
                if not wait_s:
                    self._held = (None, 0.0)  # drop the reference: a leg keeps its buffer alive
                    return self._as_ready.pop(0).post
            if is_closed:
                return None
            try:
                wakes.get(timeout=wait_s)
            except queue.Empty:
                continue
            if jobs:
                # The training thread has just queued a job. Let it leave the hook first: this thread would compete with
                # it for the interpreter's lock and, on hosts with few cores, for a core. Without this nap a step of 360
                # ms took 25 ms longer on one core.
                time.sleep(_YIELD_S)

    def _sort_in(self) -> None:
        while self._gathers:
            leg = self._gathers.popleft()
            if leg.urgency is None:
                self._in_order.append(leg)
            elif leg.ready.is_set:
                insort(self._as_ready, leg, key=_by_urgency)
            else:
                self._not_ready[leg.ready] = leg
        while self._readied:
            if (ready_leg := self._not_ready.pop(self._readied.popleft(), None)) is not None:
                insort(self._as_ready, ready_leg, key=_by_urgency)

    def _held_for_s(self, leg: GatherToPost) -> float:
        """For how long not to post ``leg``, the most urgent of those that are ready, before asking again."""
        if not leg.paced or self._is_closed or self._held_for_long(leg):
            return 0.0
        # Only asked where it counts: the thread comes here up to a hundred times a step, with as many legs.
        nothing_is_ahead = self.pace.is_relaxed and all(
            _by_urgency(leg) < _by_urgency(other) for other in self._not_ready.values()
        )
        return self.pace.idle_in_s(nothing_is_ahead=nothing_is_ahead)

    def _held_for_long(self, leg: GatherToPost) -> bool:
        if self._held[0] is not leg:
            self._held = (leg, time.monotonic())
        return not self._is_pacing or time.monotonic() - self._held[1] > _LONGEST_HOLD_S


class StagingQueue:
    """Jobs that copy gradients into fusion buffers on another thread, so that the training thread can go on.

    They run in the order of the calls.

    Args:
        post: runs a function on the thread that stages, ahead of the legs that are started later.
        failures: records a job that raises; all later legs then fail.
    """

    def __init__(self, post: Callable[[Job], None], failures: Failures) -> None:
        self._post = post
        self._failures = failures
        self._jobs: deque[Job] = deque()

    def put(self, job: Job) -> None:
        """Run ``job`` before any leg that is started later."""
        self._failures.check()
        # append() is atomic; a separate count of jobs would stay wrong if a signal handler raised in between.
        self._jobs.append(job)
        self._post(self._run)

    def finish(self) -> None:
        """Wait until all jobs have run."""
        if self._jobs and not self._failures.is_closed:
            finished = Latch()

            def finish() -> None:
                self._run()
                finished.set()

            self._post(finish)
            finished.wait()

    def _run(self) -> None:
        while self._jobs:
            try:
                self._jobs[0]()
            except Exception as error:
                self._failures.record("staging of gradients", error)
            finally:
                self._jobs.popleft()


# Ranks post gather legs in different orders, so legs that a peer has not posted yet pile up here.
_MAX_GATHER_WAITS = 64
# How many small exchanges may be under way; more wait for their turn.
_MAX_EXCHANGES = 4


class GlooThreads:
    """Runs jobs, which must not raise, on the threads of one link.

    Args:
        backlog: backlog of the link's sockets.

    Attributes:
        posting: the queue of the posting thread.
    """

    def __init__(self, backlog: SocketBacklog) -> None:
        self.posting = PostQueue(Pace(backlog))
        self._reducing: list[queue.SimpleQueue[Job | None]] = []
        self._reducing_threads: list[threading.Thread] = []
        self._waiters: list[Waiters] = []
        # A peer may answer only after it has got what legs bring, so an exchange must not hold up threads of legs.
        self._exchanges = Waiters(_MAX_EXCHANGES)
        self._posting_thread = start_thread("post", functools.partial(_run_forever, self.posting.next))
        self.add_round()

    def add_round(self) -> None:
        """Have threads for one more round of legs.

        What ends one group's scatter leg must not wait until backward has come to the next group's. And gather legs in
        their last round wait for those that peers have in their first round: no wait of the last may hold these up.
        """
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._reducing.append(jobs)
        self._reducing_threads.append(start_thread("reduce", functools.partial(_run_forever, jobs.get)))
        self._waiters.append(Waiters(_MAX_GATHER_WAITS))

    def reduce(self, job: Job, round_number: int = 0) -> None:
        """Run ``job`` on the reducing thread of a round, after the jobs given to it before."""
        self._reducing[round_number].put(job)

    def wait(self, job: Job, round_number: int = 0) -> None:
        """Run ``job``, which blocks, on a waiting thread of its own, of those of a round."""
        self._waiters[round_number].run(job)

    def wait_for_exchange(self, job: Job) -> None:
        """Run ``job``, which waits for a small exchange, on a waiting thread of its own."""
        self._exchanges.run(job)

    def join(self) -> None:
        """Let all threads end, and join them.

        Always join all threads: one that returns from gloo after the interpreter is gone ends the process by SIGABRT.
        """
        # In the order in which they hand jobs on, so that no thread is given a job after it was told to end. Threads of
        # rounds hand jobs to the posting thread, which is closed by then: those legs have failed.
        # After Ctrl-C in a join, too, each is told to end.
        with contextlib.ExitStack() as last_first:
            waiting: list[threading.Thread] = []
            last_first.callback(_join, waiting)
            last_first.callback(self._close_waiters, waiting)
            for jobs, thread in reversed([*zip(self._reducing, self._reducing_threads, strict=True)]):
                last_first.callback(thread.join)
                last_first.callback(jobs.put, None)
            last_first.callback(self._posting_thread.join)
            last_first.callback(self.posting.close)

    def _close_waiters(self, waiting: list[threading.Thread]) -> None:
        for waiters in (*self._waiters, self._exchanges):
            waiting.extend(waiters.close())


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def _run_forever(next_job: Callable[[], Job | None]) -> None:
    while (job := next_job()) is not None:
        job()
        del job  # else a finished leg and its buffer stay alive until the next job
