"""Threads that wait: one for each thing that is waited for at the same time, so that no wait hides another's end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ddp_crossover.own_threads import start_thread

Job = Callable[[], None]


class Waiters:
    """Runs blocking jobs, each at once, on threads that are kept.

    Args:
        limit: at most so many threads; further jobs queue.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unclaimed = 0  # threads that have nothing to do, less the jobs on their way to them
        self.threads: list[threading.Thread] = []

    def run(self, job: Job) -> None:
        """Run ``job`` on some thread. It must not raise."""
        with self._lock:
            self._unclaimed -= 1
            if self._unclaimed < 0 and len(self.threads) < self._limit:
                self._unclaimed += 1
                self.threads.append(start_thread("wait", self._work))
        self._jobs.put(job)

    def close(self) -> list[threading.Thread]:
        """Let the threads end after the jobs that were given; returns them, to be joined."""
        with self._lock:
            threads, self.threads = self.threads, []
        for _ in threads:
            self._jobs.put(None)
        return threads

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # else what it refers to would be kept until there is another one
            with self._lock:
                self._unclaimed += 1
