"""What a training script may do to a lease: fork, spawn, raise, be interrupted, leave, come back."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_crossover.addons.lease.client import GpuLease
from lease_processes import Actor, LeaseProcesses, eventually


def test_a_forked_child_has_no_part_in_it(pair: tuple[Actor, Actor]) -> None:
    parent, other = pair
    child = parent.call("fork")
    assert child["seen"].pop("seconds") < 1
    assert child["seen"] == {"acquired": False, "holding": False, "fence": 0, "contended": False, "sockets": 0}
    # Neither what it did nor its end changes anything.
    assert parent.call("get", "holding")
    os.kill(child["pid"], signal.SIGKILL)
    assert not other.has_answered(0.1)
    parent.call("release")
    assert other.result()


def test_a_child_forked_while_a_thread_waits_does_not_wait(processes: LeaseProcesses) -> None:
    processes.broker()
    holder, parent = processes.actor("holder"), processes.actor("parent")
    holder.call("acquire")
    assert parent.call("fork_while_a_thread_waits")["seen"]["acquired"] is False
    holder.call("release")
    eventually(lambda: parent.call("get", "holding"))


def test_a_spawned_program_inherits_nothing(processes: LeaseProcesses) -> None:
    processes.broker()
    actor = processes.actor("a")
    actor.call("acquire")
    assert actor.call("sockets_of_a_new_program") == 0
    assert actor.call("get", "holding")


def test_it_cannot_be_sent_to_another_process(make_lease: Callable[..., GpuLease]) -> None:
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(make_lease(connects=False))


@pytest.mark.parametrize("ends", ["raise_while_holding", "interrupt_while_holding"])
def test_a_block_that_raises_releases(processes: LeaseProcesses, ends: str) -> None:
    processes.broker()
    actor, other = processes.actor("a"), processes.actor("b")
    assert actor.call(ends) is False
    assert other.call("acquire")


def test_a_waiter_that_is_interrupted_waits_no_longer(processes: LeaseProcesses) -> None:
    processes.broker()
    holder, waiter, other = (processes.actor(name) for name in ("holder", "waiter", "other"))
    holder.call("acquire")
    assert waiter.call("interrupt_while_waiting", 0.1) is False
    eventually(lambda: not holder.call("get", "contended"))
    holder.call("release")
    assert other.call("hold_for", 0.0)["leased"]
    assert waiter.call("hold_for", 0.0)["leased"]


def test_interrupts_at_any_moment_leave_nothing_behind(processes: LeaseProcesses) -> None:
    processes.broker()
    actor, other = processes.actor("a"), processes.actor("b", max_wait_s=1000)
    assert actor.call("interrupt_at_every_point", 300, 2e-6) > 0
    assert actor.call("hold_for", 0.0)["leased"]
    assert other.call("acquire")


def test_a_script_that_ends_while_it_holds_releases(processes: LeaseProcesses) -> None:
    processes.broker()
    actor, other = processes.actor("a"), processes.actor("b", max_wait_s=1000)
    actor.call("acquire")
    actor.start("exit")
    assert other.call("acquire")
    assert actor.process.wait(20) == 0


def test_a_closed_lease_is_none(processes: LeaseProcesses) -> None:
    processes.broker()
    actor, other = processes.actor("a"), processes.actor("b")
    actor.call("acquire")
    actor.call("close")
    assert other.call("acquire")
    assert actor.call("get", "holding") is actor.call("get", "contended") is actor.call("acquire") is False
    actor.call("release")
    actor.call("close")


def test_a_lease_that_nobody_holds_on_to_leaves(
    processes: LeaseProcesses, lease_directory: Path, lease: GpuLease
) -> None:
    dropped = GpuLease("cpu:0", job="dropped", directory=lease_directory, spawn_broker=False)
    assert dropped.wait_until_connected(20)
    assert dropped.acquire()
    del dropped
    gc.collect()
    eventually(lambda: len(processes.status()["resources"][0]["members"]) == 1)
    assert lease.acquire()


def test_who_has_waited_long_enough_goes_on_unleased(
    processes: LeaseProcesses, make_lease: Callable[..., GpuLease], caplog: pytest.LogCaptureFixture
) -> None:
    processes.broker()
    other, impatient = processes.actor("other"), make_lease(max_wait_s=0.05)
    other.call("acquire")
    with caplog.at_level(logging.WARNING, "ddp_crossover"):
        assert [impatient.acquire() for _ in range(3)] == [False] * 3
    assert impatient.stats().unleased == {"waited for 0.05 s": 3}
    assert len(caplog.records) == 1
    eventually(lambda: not other.call("get", "contended"))


def test_without_a_broker_nothing_waits(make_lease: Callable[..., GpuLease]) -> None:
    lease = make_lease(connects=False)
    with lease.held() as leased:
        assert not leased
    assert not lease.yield_turn()
    assert not lease.contended and not lease.asked_to_yield and not lease.connected
    assert lease.stats().waited_s == 0
    assert sum(lease.stats().unleased.values()) == 2


def test_a_broker_that_cannot_be_started_is_no_error(tmp_path: Path, make_lease: Callable[..., GpuLease]) -> None:
    (tmp_path / "file").touch()
    lease = make_lease(connects=False, directory=tmp_path / "file" / "directory", spawn_broker=True)
    eventually(lambda: not lease.acquire() and "Not a directory" in str(lease.stats().unleased))


def test_nested_holds_are_one(lease: GpuLease) -> None:
    with lease.held():
        fence = lease.fence
        with lease.held():
            assert lease.fence == fence
        assert lease.fence == fence
        assert lease.acquire()
        assert lease.fence == fence
    assert lease.fence == 0


def test_threads_may_share_it(lease: GpuLease) -> None:
    def work() -> None:
        for _ in range(50):
            lease.acquire()
            lease.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert lease.stats().unleased == {}
    with lease.held() as leased:
        assert leased


@pytest.mark.parametrize(
    "options",
    [
        {"weight": 0.0},
        {"weight": float("nan")},
        {"weight": 1000.0},
        {"job": ""},
        {"job": "a\nb"},
        {"job": "x" * 97},
        {"resource": ""},
        {"role": "boss"},
        {"max_wait_s": -1.0},
        {"max_stall_s": 0.0},
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        GpuLease(**{"resource": "cpu:0", "job": "job", "spawn_broker": False, **options})
