"""Jobs that wait do not wait for each other, up to a limit, and threads are kept."""

from __future__ import annotations

import threading

import pytest

from ddp_crossover.comm.gloo_threads import Waiters

SOON_S = 10.0

pytestmark = pytest.mark.quick


def _close(waiters: Waiters) -> None:
    for thread in waiters.close():
        thread.join(SOON_S)
        assert not thread.is_alive()


def test_a_job_that_hangs_hides_no_other() -> None:
    waiters = Waiters(limit=3)
    release = threading.Event()
    ended = [threading.Event() for _ in range(5)]
    waiters.run(release.wait)
    waiters.run(release.wait)
    for event in ended:
        waiters.run(event.set)
    assert all(event.wait(SOON_S) for event in ended)
    assert not release.is_set()
    release.set()
    _close(waiters)


def test_jobs_beyond_the_limit_run_later_and_none_is_lost() -> None:
    waiters = Waiters(limit=2)
    release, last = threading.Event(), threading.Event()
    ran: list[int] = []
    for _ in range(2):
        waiters.run(release.wait)
    for number in range(10):
        waiters.run(lambda number=number: ran.append(number))
    waiters.run(last.set)
    assert not last.wait(0.05)
    release.set()
    assert last.wait(SOON_S)
    threads = waiters.close()
    assert len(threads) == 2
    for thread in threads:
        thread.join(SOON_S)
    assert sorted(ran) == list(range(10))


def test_a_thread_that_is_free_gets_the_next_job() -> None:
    waiters = Waiters(limit=50)
    idents: set[int] = set()
    for _ in range(20):
        done = threading.Event()

        def job(done: threading.Event = done) -> None:
            idents.add(threading.get_ident())
            done.set()

        waiters.run(job)
        assert done.wait(SOON_S)
        while waiters._unclaimed < 1:  # a moment between the end of a job and the thread's being free
            pass
    assert len(idents) == 1
    _close(waiters)


def test_close_lets_the_jobs_that_were_given_end() -> None:
    waiters = Waiters(limit=1)
    ran: list[int] = []
    release = threading.Event()
    waiters.run(lambda: ran.append(int(release.wait(SOON_S))))
    waiters.run(lambda: ran.append(2))
    threads = waiters.close()
    release.set()
    for thread in threads:
        thread.join(SOON_S)
    assert ran == [1, 2]
