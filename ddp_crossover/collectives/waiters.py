"""Threads for blocking waits: each wait has its own thread, so that it does not delay noticing the end of another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

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
