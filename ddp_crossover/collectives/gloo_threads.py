"""The threads of a gloo link. Gloo's calls block, and the training thread must not: it waits on Python events only.

One thread stages gradients and posts messages, in the order that ``gloo_posting`` decides; one adds up received
slices; a few wait for gather legs. They know nothing about legs, only jobs.
"""

from __future__ import annotations

import queue
import threading

from ddp_crossover.collectives.gloo_posting import PostQueue
from ddp_crossover.collectives.pace import Pace
from ddp_crossover.collectives.socket_backlog import SocketBacklog
from ddp_crossover.collectives.waiters import Job, Waiters
from ddp_crossover.own_threads import start_thread

# Ranks post gather legs in different orders, so legs that a peer has not posted yet pile up here.
_MAX_GATHER_WAITS = 64


class GlooThreads:
    """Runs jobs, which must not raise, on the threads of one link.

    Args:
        backlog: backlog of the link's sockets.

    Attributes:
        posting: the queue of the posting thread.
    """

    def __init__(self, backlog: SocketBacklog) -> None:
        self.posting = PostQueue(Pace(backlog))
        self._reducing: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiters = Waiters(_MAX_GATHER_WAITS)
        self._threads = [start_thread("post", self._post_forever), start_thread("reduce", self._reduce_forever)]

    def reduce(self, job: Job) -> None:
        """Run ``job`` on the reducing thread, after the jobs given to it before."""
        self._reducing.put(job)

    def wait(self, job: Job) -> None:
        """Run ``job``, which blocks, on a waiting thread of its own."""
        self._waiters.run(job)

    def join(self) -> None:
        """Let all threads end, and join them.

        Always join all threads: one that returns from gloo after the interpreter is gone ends the process by SIGABRT.
        """
        posting, reducing = self._threads
        # In the order in which they hand jobs on, so that no thread is given a job after it was told to end.
        # After Ctrl-C in a join, too, each is told to end.
        waiting: list[threading.Thread] = []
        self.posting.close()
        try:
            posting.join()
        finally:
            self._reducing.put(None)
            try:
                reducing.join()
            finally:
                waiting = self._waiters.close()
        for thread in waiting:
            thread.join()

    def _post_forever(self) -> None:
        while (job := self.posting.next()) is not None:
            job()
            del job  # else a finished leg and its buffer stay alive until the next job

    def _reduce_forever(self) -> None:
        while (job := self._reducing.get()) is not None:
            job()
            del job  # else a finished leg and its buffer stay alive until the next job
