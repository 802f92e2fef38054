"""A fault in each moment of a held forward: the same bits, and nobody waits for longer than the lease's limits.

Signals are sent by the rank whose forward is held, in that moment, and each fault strikes once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from harness import Outcome, assert_lost_peer_is_named, run_faulty_ranks
from held_forward import MOMENTS, STEPS, assert_bits, others, slow_legs, strike_at, train_on_slow_legs
from lease_processes import LeaseProcesses, eventually
from lease_training import Job, make_lease

# Without a fault a run takes 2 s; the longest limit of the lease is 15 s, the rest is for a busy machine.
TIMEOUT_S = 60.0
OTHERS_S = 2 * TIMEOUT_S  # longer than any run
GROUP_TIMEOUT_S = 8.0
GRACE_S = 12.0
STRUCK_RANK = 1

in_each_moment = pytest.mark.parametrize("moment", MOMENTS)


@pytest.fixture(scope="module")
def bits() -> dict[str, Any]:
    return {}


@pytest.fixture
def expected(on_ranks: Any, bits: dict[str, Any]) -> Any:
    if not bits:
        bits["expected"] = on_ranks(train_on_slow_legs, 2, None, STEPS)
    return bits["expected"]


def train_and_strike(directory: str, moment: str, strike: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    strikes = strike_at(moment, lambda: strike(*arguments)) if dist.get_rank() == STRUCK_RANK else nullcontext()
    with strikes:
        return train_on_slow_legs(directory, STEPS)


def stop_itself(struck: str, go_on: str) -> None:
    Path(struck).touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def be_late(struck: str, go_on: str) -> None:
    Path(struck).touch()
    eventually(Path(go_on).exists)


def kill_itself(struck: str) -> None:
    Path(struck).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def fence(processes: LeaseProcesses) -> int:
    """Grows with each hold of the struck rank's device."""
    [fence] = [
        resource["fence"]
        for resource in processes.status()["resources"]
        if resource["resource"] == f"cpu:{STRUCK_RANK}"
    ]
    return fence


def others_get_on(processes: LeaseProcesses) -> None:
    """Wait until the device has been granted more often than to one that holds it and one that asks for it."""
    before = fence(processes)
    eventually(lambda: fence(processes) > before + 3)


@in_each_moment
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_job_that_is_killed_or_stopped_changes_nothing(
    on_ranks, processes: LeaseProcesses, lease_directory: Path, expected: Any, number: int, moment: str
) -> None:
    processes.broker()
    other = others(processes, OTHERS_S)[STRUCK_RANK]
    arguments = (str(lease_directory), moment, os.kill, other.pid, number)
    seen = on_ranks(train_and_strike, 2, *arguments, timeout_s=TIMEOUT_S)
    assert_bits(seen, expected)
    # Nobody has waited for it for as long as a job may be kept out.
    assert all(stats.lease.unleased == {} for _, stats in seen)
    if number == signal.SIGSTOP:
        other.signal(signal.SIGCONT)
        others_get_on(processes)


@in_each_moment
def test_a_broker_that_is_killed_changes_nothing_and_is_replaced(
    on_ranks, processes: LeaseProcesses, lease_directory: Path, expected: Any, moment: str
) -> None:
    broker = processes.broker()
    others(processes, OTHERS_S, spawn_broker=True)
    arguments = (str(lease_directory), moment, os.kill, broker.pid, signal.SIGKILL)
    assert_bits(on_ranks(train_and_strike, 2, *arguments, timeout_s=TIMEOUT_S), expected)
    assert broker.wait(TIMEOUT_S) == -signal.SIGKILL
    eventually(lambda: _is_served(processes))
    others_get_on(processes)


def _is_served(processes: LeaseProcesses) -> bool:
    try:
        return any(resource["resource"] == f"cpu:{STRUCK_RANK}" for resource in processes.status()["resources"])
    except OSError:
        return False


@in_each_moment
@pytest.mark.parametrize(("fault", "limits"), [(stop_itself, {}), (be_late, {"hold_s": 0.5})], ids=["stopped", "late"])
def test_while_a_rank_is_stopped_or_late_the_other_job_gets_on(
    on_ranks,
    processes: LeaseProcesses,
    lease_directory: Path,
    tmp_path: Path,
    expected: Any,
    fault: Callable[..., None],
    limits: dict[str, float],
    moment: str,
) -> None:
    # A late holder is alive: only a limit ends its hold, which is 10 s where no test waits for it.
    processes.broker(limits=limits)
    others(processes, OTHERS_S)
    struck, go_on = tmp_path / "struck", tmp_path / "go_on"
    arguments = (str(lease_directory), moment, fault, str(struck), str(go_on))
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(on_ranks, train_and_strike, 2, *arguments, timeout_s=TIMEOUT_S)
        eventually(lambda: struck.exists() or training.done())
        try:
            if not training.done():
                others_get_on(processes)
        finally:
            go_on.touch()
            for pid in _members(processes, "training"):
                os.kill(pid, signal.SIGCONT)
        seen = training.result()
    assert_bits(seen, expected)
    assert all(stats.lease.unleased == {} for _, stats in seen)


def _members(processes: LeaseProcesses, job: str) -> list[int]:
    members = [member for resource in processes.status()["resources"] for member in resource["members"]]
    return [member["pid"] for member in members if member["job"] == job]


def train_until_killed(directory: str, moment: str, trains: str, struck: str) -> NoReturn:
    is_struck = dist.get_rank() == STRUCK_RANK
    with slow_legs(), strike_at(moment, lambda: kill_itself(struck)) if is_struck else nullcontext():
        job = Job(make_lease(directory, job="killed"))
        while True:
            job.step()
            if is_struck:
                Path(trains).touch()


@pytest.mark.launches
@in_each_moment
def test_a_killed_rank_is_named_and_the_other_job_trains_to_the_end(
    on_ranks, processes: LeaseProcesses, lease_directory: Path, tmp_path: Path, expected: Any, moment: str
) -> None:
    processes.broker()
    trains, struck = tmp_path / "trains", tmp_path / "struck"
    arguments = (str(lease_directory), moment, str(trains), str(struck))

    def end_of_killed_job() -> tuple[list[Outcome], float]:
        began_s = time.monotonic()
        outcomes = run_faulty_ranks(
            train_until_killed, 2, *arguments, group_timeout_s=GROUP_TIMEOUT_S, timeout_s=TIMEOUT_S
        )
        return outcomes, float(struck.read_text()) - began_s

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(end_of_killed_job)
        eventually(lambda: trains.exists() or killed.done())
        seen = on_ranks(train_on_slow_legs, 2, str(lease_directory), STEPS, timeout_s=TIMEOUT_S)
        outcomes, struck_after_s = killed.result()
    assert outcomes[STRUCK_RANK].exitcode == -signal.SIGKILL
    assert_lost_peer_is_named(outcomes[:STRUCK_RANK], within_s=struck_after_s + GROUP_TIMEOUT_S + GRACE_S)
    assert_bits(seen, expected)
    assert all(stats.lease.unleased == {} for _, stats in seen)
