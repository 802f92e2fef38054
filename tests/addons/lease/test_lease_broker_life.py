"""One broker, whoever starts it and however the last one ended."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lease_processes import LeaseProcesses, eventually


def test_the_first_client_starts_a_broker_that_outlives_it(processes: LeaseProcesses) -> None:
    first = processes.actor("first", spawn_broker=True)
    pid = processes.status()["pid"]
    first.end()
    second = processes.actor("second", spawn_broker=True)
    assert processes.status()["pid"] == pid
    assert second.call("acquire")


def test_clients_that_come_together_share_one_broker(processes: LeaseProcesses) -> None:
    actors = [processes.actor(f"job {index}", spawn_broker=True, connect=False) for index in range(5)]
    for actor in actors:
        assert actor.call("wait_until_connected", 20)
    [resource] = processes.status()["resources"]
    assert len(resource["members"]) == 5


def test_of_brokers_that_race_one_serves(processes: LeaseProcesses) -> None:
    brokers = [processes.start_broker() for _ in range(5)]
    answers = [broker.stdout.readline() for broker in brokers if broker.stdout is not None]
    assert sorted(answers) == [b"another one serves\n"] * 4 + [b"serving\n"]


def test_a_spawned_broker_is_not_bound_to_the_core_of_its_client(processes: LeaseProcesses) -> None:
    core = min(os.sched_getaffinity(0))
    processes.actor("pinned", spawn_broker=True, wrapper=("taskset", "-c", str(core)))
    assert os.sched_getaffinity(processes.status()["pid"]) >= os.sched_getaffinity(0)


def test_the_socket_of_a_dead_broker_is_replaced(processes: LeaseProcesses, lease_directory: Path) -> None:
    broker = processes.broker()
    broker.kill()
    broker.wait()
    assert (lease_directory / "broker.sock").exists()
    actor = processes.actor("a", spawn_broker=True)
    assert actor.call("acquire")


def test_a_hold_does_not_outlive_its_broker(processes: LeaseProcesses) -> None:
    broker = processes.broker()
    holder, other = processes.actor("holder"), processes.actor("other")
    holder.call("acquire")
    fence = holder.call("get", "fence")
    broker.kill()
    broker.wait()
    processes.broker()
    eventually(lambda: holder.call("get", "connected") and other.call("get", "connected"))
    assert not holder.call("get", "holding")
    assert other.call("acquire")
    assert other.call("get", "fence") > fence
    holder.call("release")
    assert holder.call("stats")["lost"] == 1
    assert other.call("get", "holding")


def test_a_broker_without_clients_ends(processes: LeaseProcesses, lease_directory: Path) -> None:
    broker = processes.broker(idle_exit_s=0.1)
    assert broker.wait(20) == 0
    assert not (lease_directory / "broker.sock").exists()


def test_a_broker_with_clients_stays(processes: LeaseProcesses) -> None:
    broker = processes.broker(idle_exit_s=0.1)
    actor = processes.actor("a")
    actor.call("pause", 2.5)
    assert broker.poll() is None
    assert actor.call("acquire")


def test_a_broker_whose_directory_was_cleaned_up_makes_way(processes: LeaseProcesses, lease_directory: Path) -> None:
    broker = processes.broker()
    actor = processes.actor("a", spawn_broker=True)
    shutil.rmtree(lease_directory)
    assert broker.wait(20) == 0
    # The directory is new: right after the broker's end, the client may not have noticed that its connection is lost.
    eventually(lambda: lease_directory.exists() and actor.call("get", "connected"))
    assert processes.status()["pid"] != broker.pid
