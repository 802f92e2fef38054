"""The threads of a gloo link. Gloo's calls block, and the training thread must not: it waits on Python events only.

One thread stages gradients and posts messages, in the order that ``gloo_posting`` decides; one adds up received
slices; a few wait for gather legs and small exchanges. Second rounds have a thread that adds up and a few that wait of
their own. They know nothing about legs, only jobs.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading

from ddp_crossover.collectives.gloo_posting import PostQueue
from ddp_crossover.collectives.pace import Pace
from ddp_crossover.collectives.socket_backlog import SocketBacklog
from ddp_crossover.collectives.waiters import Job, Waiters
from ddp_crossover.own_threads import start_thread

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
        self._posting_thread = start_thread("post", self._post_forever)
        self.add_round()

    def add_round(self) -> None:
        """Have threads for one more round of legs.

        What ends one group's scatter leg must not wait until backward has come to the next group's. And gather legs in
        their last round wait for those that peers have in their first round: no wait of the last may hold these up.
        """
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._reducing.append(jobs)
        self._reducing_threads.append(start_thread("reduce", functools.partial(_run_forever, jobs)))
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

    def _post_forever(self) -> None:
        while (job := self.posting.next()) is not None:
            job()
            del job  # else a finished leg and its buffer stay alive until the next job


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def _run_forever(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # else a finished leg and its buffer stay alive until the next job
