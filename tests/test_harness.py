"""The harness itself: a failure in any rank must fail the test, quickly and with its traceback."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness import RankFailure, run_faulty_ranks, run_ranks


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("rank 1 has something against it")
        raise ValueError("only rank 1 objects")
    time.sleep(60)


def _hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        _sleep_where_the_stack_shows_it()


def _sleep_where_the_stack_shows_it() -> None:
    time.sleep(60)


def _crash_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def _leave_a_thread_behind() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()


def _wait_for_rank_0_which_has_returned() -> str:
    if dist.get_rank() == 0:
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.irecv(torch.zeros(1), src=0).wait(timedelta(seconds=1))
    return str(caught.value)


def _signal_rank_1(number: int) -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
        time.sleep(60)
    try:
        dist.barrier()
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def test_a_rank_that_has_returned_stays_connected_until_all_have() -> None:
    assert "Timed out" in run_ranks(_wait_for_rank_0_which_has_returned, 2)[1]


def test_the_first_failure_ends_the_others_and_shows_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 of 2 failed(.|\n)*only rank 1 objects(.|\n)*something against it"):
        run_ranks(_raise_on_rank_1, 2)
    assert time.monotonic() - start < 20, "rank 0 sleeps for 60 s and must not be waited for"


def test_a_rank_that_crashes_ends_the_others_and_shows_where() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2 died, exit code -11(.|\n)*_crash_on_rank_1"):
        run_ranks(_crash_on_rank_1, 2)


def test_a_hang_is_reported_with_the_stack_it_hangs_in() -> None:
    with pytest.raises(RankFailure, match="_sleep_where_the_stack_shows_it"):
        run_ranks(_hang_on_rank_0, 2, timeout_s=8)


def test_a_thread_that_keeps_the_process_alive_is_a_failure(monkeypatch) -> None:
    monkeypatch.setattr("bench_kit.rank_processes.EXIT_TIMEOUT_S", 1.0)
    with pytest.raises(RankFailure, match="did not exit"):
        run_ranks(_leave_a_thread_behind, 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_outcomes_tell_who_was_killed_and_what_the_others_saw(number: int) -> None:
    stops = frozenset({1} if number == signal.SIGSTOP else ())
    lost, killed = run_faulty_ranks(_signal_rank_1, 2, number, group_timeout_s=2, timeout_s=20, stops=stops)
    assert (lost.exitcode, lost.error, lost.result != "no error") == (0, None, True)
    assert killed.exitcode == -signal.SIGKILL
