"""Processes that die or stop: whoever waits gets the resource, and nobody waits for the dead."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from lease_processes import Actor, LeaseProcesses, eventually


@pytest.mark.parametrize(("child", "sockets"), [("fork", 0), ("fork_with_open_socket", 1)])
def test_a_killed_holder_is_succeeded_while_its_child_lives(
    pair: tuple[Actor, Actor], child: str, sockets: int
) -> None:
    """Also where the connection stays open, so that its end does not tell."""
    holder, waiter = pair
    forked = holder.call(child)
    assert forked["seen"]["sockets"] == sockets
    holder.signal(signal.SIGKILL)
    assert waiter.result()
    os.kill(forked["pid"], 0)


def test_a_killed_waiter_is_passed_over(processes: LeaseProcesses, pair: tuple[Actor, Actor]) -> None:
    holder, waiter = pair
    waiter.signal(signal.SIGKILL)
    eventually(lambda: not holder.call("get", "contended"))
    other = processes.actor("other")
    other.start("acquire")
    eventually(lambda: holder.call("get", "contended"))
    holder.call("release")
    assert other.result()


def test_a_stopped_holder_is_succeeded_and_its_release_is_stale(
    processes: LeaseProcesses, pair: tuple[Actor, Actor]
) -> None:
    holder, waiter = pair
    holder.signal(signal.SIGSTOP)
    assert waiter.result()
    holder.signal(signal.SIGCONT)
    assert not holder.call("get", "holding")
    third = processes.actor("third", max_wait_s=1000)
    third.start("acquire")
    eventually(lambda: waiter.call("get", "contended"))
    holder.call("release")
    assert holder.call("stats")["lost"] == 1
    assert waiter.call("get", "holding")
    assert not third.has_answered(0.2)
    waiter.call("release")
    assert third.result()


def test_a_broker_that_is_killed_again_and_again_is_replaced(processes: LeaseProcesses) -> None:
    actors = [processes.actor(name, spawn_broker=True) for name in "ab"]
    killed = set()
    for _ in range(5):
        for actor in actors:
            actor.start("take_turns", 0.2, 0.001, 0.0)
        broker = processes.status()["pid"]
        assert broker not in killed
        killed.add(broker)
        os.kill(broker, signal.SIGKILL)
        for actor in actors:
            actor.result()
            assert actor.call("wait_until_connected", 20)
    assert [actor.call("hold_for", 0.0)["leased"] for actor in actors] == [True, True]


def test_a_killed_broker_stops_nobody(processes: LeaseProcesses, pair: tuple[Actor, Actor]) -> None:
    holder, waiter = pair
    os.kill(processes.status()["pid"], signal.SIGKILL)
    assert waiter.result() is False
    assert sum(waiter.call("stats")["unleased"].values()) == 1
    eventually(lambda: not holder.call("get", "connected"))
    assert not holder.call("get", "contended")
    holder.call("release")
    assert holder.call("acquire") is False
    processes.broker()
    for actor in (holder, waiter):
        assert actor.call("wait_until_connected", 20)
        assert actor.call("acquire")
        actor.call("release")


def test_a_stopped_broker_stops_nobody(processes: LeaseProcesses) -> None:
    broker = processes.broker()
    actor = processes.actor("a", max_stall_s=0.1)
    broker.send_signal(signal.SIGSTOP)
    assert actor.call("acquire") is False
    stats = actor.call("stats")
    assert list(stats["unleased"]) == ["the broker does not answer"]
    # Not again and again: until it answers, nobody asks it any more.
    for _ in range(20):
        assert actor.call("acquire") is False
    assert actor.call("stats")["waited_s"] == stats["waited_s"]
    broker.send_signal(signal.SIGCONT)
    assert actor.call("wait_until_connected", 20)
    assert actor.call("acquire")


@pytest.mark.skipif(not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK), reason="choosing a pid needs root")
def test_a_reused_pid_does_not_pass_for_the_holder(processes: LeaseProcesses) -> None:
    broker = processes.broker()
    holder, waiter = processes.actor("holder"), processes.actor("waiter", max_wait_s=1000)
    holder.call("acquire")
    holder.call("fork_with_open_socket")  # so that only the pid could tell
    broker.send_signal(signal.SIGSTOP)  # the pid is in use again before the broker can look
    holder.process.kill()
    holder.process.wait()
    impostor = _process_with_pid(holder.pid)
    try:
        broker.send_signal(signal.SIGCONT)
        eventually(lambda: waiter.call("acquire"))
        assert impostor.poll() is None
    finally:
        impostor.kill()
        impostor.wait()


def _process_with_pid(pid: int) -> subprocess.Popen[bytes]:
    for _ in range(200):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        process = subprocess.Popen(["sleep", "60"])
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    pytest.skip(f"pid {pid} could not be had again")
