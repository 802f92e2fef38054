"""Copies gradients into fusion buffers on another thread, so that the training thread can go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ddp_crossover.collectives.gloo_threads import Job
from ddp_crossover.collectives.leg import Failures, Latch


class StagingQueue:
    """Staging jobs, in the order of the calls.

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
