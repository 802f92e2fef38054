"""A forward is held for another job, on real ranks: the same bits, one turn a step, whatever becomes of that job.

Gather legs of all ranks end a few milliseconds after each other, as on a slow link.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from held_forward import APART_S, GROUPS, STEPS, assert_bits, others, train_on_slow_legs
from lease_processes import LeaseProcesses


@pytest.fixture
def expected(on_ranks: Any) -> Any:
    return on_ranks(train_on_slow_legs, 2, None, STEPS)


def test_a_held_forward_leaves_one_gap_a_step_to_the_other_job(
    on_ranks, processes: LeaseProcesses, lease_directory: Path, expected: Any
) -> None:
    processes.broker()
    others(processes)
    seen = on_ranks(train_on_slow_legs, 2, str(lease_directory), STEPS)
    assert_bits(seen, expected)
    for _, stats in seen:
        lease = stats.lease
        assert lease.unleased == {}
        # One gap and one turn a step; the first steps are not predicted, and the machine may be busy. Were each wait
        # given away by itself, there would be seven.
        assert STEPS / 2 <= lease.gaps < 2 * STEPS
        assert lease.grants < 2.5 * STEPS
        # Legs come one after the other for longer than the first one of them.
        assert lease.predicted_s > STEPS / 2 * 2 * APART_S
        assert lease.filled_s > lease.given_s / 2


def test_alone_no_forward_is_held(on_ranks, processes: LeaseProcesses, lease_directory: Path, expected: Any) -> None:
    processes.broker()
    seen = on_ranks(train_on_slow_legs, 2, str(lease_directory), STEPS)
    assert_bits(seen, expected)
    assert all(stats.lease.predicted_s == stats.lease.late_s == stats.lease.given_s == 0.0 for _, stats in seen)


def disturbed(on_ranks: Any, lease_directory: Path, disturb: Callable[[int], None]) -> Any:
    """Train while a thread disturbs again and again, each time at another moment of a step."""
    over = threading.Event()

    def run() -> None:
        count = 0
        while not over.wait(0.03 + 0.7 * APART_S * (count % GROUPS)):
            disturb(count)
            count += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return on_ranks(train_on_slow_legs, 2, str(lease_directory), STEPS)
    finally:
        over.set()
        thread.join()


def test_brokers_that_are_killed_in_each_moment_of_a_held_forward_change_nothing(
    on_ranks, processes: LeaseProcesses, lease_directory: Path, expected: Any
) -> None:
    kills: list[int] = []
    others(processes, spawn_broker=True)

    def kill_broker(count: int) -> None:
        with suppress(OSError):  # there is none at the moment
            os.kill(processes.status()["pid"], signal.SIGKILL)
            kills.append(count)

    assert_bits(disturbed(on_ranks, lease_directory, kill_broker), expected)
    assert len(kills) > 3


def test_nor_do_jobs_that_are_killed(on_ranks, processes: LeaseProcesses, lease_directory: Path, expected: Any) -> None:
    processes.broker()
    alive = others(processes)

    def replace(count: int) -> None:
        alive[count % 2].signal(signal.SIGKILL)
        alive[count % 2] = processes.actor("other", resource=f"cpu:{count % 2}", connect=False)
        alive[count % 2].start("take_turns", 20.0, 3e-3, 5e-4)

    seen = disturbed(on_ranks, lease_directory, replace)
    assert_bits(seen, expected)
    # Nobody has waited for the dead for as long as a job may be kept out.
    assert all(stats.lease.unleased == {} for _, stats in seen)


def test_nor_do_jobs_that_are_stopped(
    on_ranks, processes: LeaseProcesses, lease_directory: Path, expected: Any
) -> None:
    processes.broker()
    actors = others(processes)

    def stop_and_go_on(count: int) -> None:
        actors[count % 2].signal(signal.SIGSTOP)
        time.sleep(0.05)
        actors[count % 2].signal(signal.SIGCONT)

    seen = disturbed(on_ranks, lease_directory, stop_and_go_on)
    assert_bits(seen, expected)
    assert all(stats.lease.unleased == {} for _, stats in seen)


def test_nor_does_one_that_holds_for_longer_than_a_forward_is_held(
    on_ranks, processes: LeaseProcesses, lease_directory: Path, expected: Any
) -> None:
    processes.broker()
    for rank in range(2):
        processes.actor("late", resource=f"cpu:{rank}").start("take_turns", 20.0, 0.1, 0.05)
    seen = on_ranks(train_on_slow_legs, 2, str(lease_directory), STEPS)
    assert_bits(seen, expected)
    assert all(stats.lease.unleased == {} and stats.lease.late_s > 0.0 for _, stats in seen)
