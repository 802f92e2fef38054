"""A holder that hands over wakes the next client itself, and tells the broker afterwards."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ddp_crossover.addons.lease.broker.arbiter import Arbiter, Grant
from ddp_crossover.addons.lease.broker.fairness import AHEAD_S, EQUAL_S
from ddp_crossover.addons.lease.broker.jobs import JobKey
from ddp_crossover.addons.lease.protocol import Kind, Role
from ddp_crossover.addons.lease.shared_memory import NOBODY, PageReader, PageWriter, ResourceState, Successor
from lease_processes import Actor, LeaseProcesses, eventually

GPU = "GPU-0"
APART_S = 2 * EQUAL_S


# ---- what the broker promises; test_lease_arbiter_states.py has to whom it may, and that fences are kept


def arbiter_with(*names: str) -> Arbiter:
    """Member 1 of the first job, which holds, member 2 of the second, ..."""
    arbiter = Arbiter(first_fence=100)
    for member, name in enumerate(names, 1):
        role = Role.FILLER if name == "filler" else Role.PEER
        arbiter.join(member, JobKey(1000, name), GPU, role, 1.0)
    arbiter.request(1, 1, 0.0)
    return arbiter


def test_the_next_job_is_promised_the_fence_that_it_is_granted() -> None:
    arbiter = arbiter_with("a", "b")
    assert arbiter.view(GPU).successor == NOBODY
    arbiter.request(2, 7, 0.1)
    assert arbiter.view(GPU).successor == Successor(101, 2, 7, True)
    assert arbiter.release(1, 100, 0, 0.2, handed=101) == [Grant(2, 7, 101)]
    assert arbiter.view(GPU).successor == NOBODY


def test_a_promise_follows_the_queue_and_a_holder_that_was_quicker_is_believed() -> None:
    arbiter = arbiter_with("a", "filler", "b")
    arbiter.request(2, 1, 0.1)
    first = arbiter.view(GPU).successor
    arbiter.request(3, 1, 0.1 + APART_S)
    second = arbiter.view(GPU).successor
    assert (first.member, second.member) == (2, 3)
    assert arbiter.release(1, 100, 0, 0.2, handed=first.fence) == [Grant(2, 1, first.fence)]
    assert arbiter.view(GPU).successor.member == 3


def test_a_promise_to_a_client_that_has_cancelled_binds_nobody() -> None:
    arbiter = arbiter_with("a", "b", "c")
    arbiter.request(2, 1, 0.1)
    promised = arbiter.view(GPU).successor.fence
    arbiter.request(3, 1, 0.1 + APART_S)
    arbiter.cancel(2, 1, 0.2)
    arbiter.request(2, 2, 0.3)  # behind the other one now
    [grant] = arbiter.release(1, 100, 0, 0.4, handed=promised)
    assert grant.member == 3
    assert grant.fence > promised


def test_what_was_promised_under_an_earlier_hold_is_void() -> None:
    arbiter = arbiter_with("a", "filler", "b")
    arbiter.request(2, 1, 0.1)
    stale = arbiter.view(GPU).successor.fence
    arbiter.request(3, 1, 0.1 + APART_S)
    [grant] = arbiter.release(1, 100, 0, 0.2)
    arbiter.request(1, 2, 0.3)
    assert [each.member for each in arbiter.release(3, grant.fence, 0, 0.4, handed=stale)] == [1]


def test_a_holder_that_is_behind_keeps_its_turn_if_it_asks_again() -> None:
    arbiter = arbiter_with("a", "b")
    arbiter.request(2, 1, 0.0)
    [grant] = arbiter.release(1, 100, 0, 2 * AHEAD_S)  # b is behind
    arbiter.request(1, 2, 2 * AHEAD_S)
    assert not arbiter.view(GPU).successor.even_if_again
    [again] = arbiter.release(2, grant.fence, 2, 2 * AHEAD_S + APART_S)
    assert again.member == 2


def test_a_promise_is_on_the_page_for_the_current_hold_only() -> None:
    writer = PageWriter()
    page = PageReader(writer.fd, 0)
    os.close(writer.fd)
    promise = Successor(9, 3, (1 << 32) - 1, True)
    writer.show(0, ResourceState(fence=8, successor=promise))
    assert page.successor(8) == promise
    assert page.successor(7) == NOBODY
    assert page.promises(9, 3, (1 << 32) - 1)
    assert not page.promises(9, 2, (1 << 32) - 1) and not page.promises(9, 3, 1) and not page.promises(8, 3, 1)
    assert page.admits(8) and page.admits(9) and not page.admits(7)
    writer.show(0, ResourceState(fence=9))
    assert page.successor(9) == NOBODY
    assert page.admits(9) and not page.admits(8)


# ---- processes


@pytest.fixture
def broker_pid(processes: LeaseProcesses, pair: tuple[Actor, Actor]) -> int:
    return int(processes.status()["pid"])


def third_job_gets_it(processes: LeaseProcesses, *others: Actor) -> Actor:
    """Whoever holds now gives it up, and nobody is left in the queue."""
    third = processes.actor("third", max_wait_s=1000)
    third.start("acquire")
    for other in others:
        other.call("release")
    assert third.result()
    [resource] = processes.status()["resources"]
    assert (resource["holder"], resource["waiting"]) == ("third", [])
    return third


def test_the_next_client_goes_on_while_the_broker_does_not_run(pair: tuple[Actor, Actor], broker_pid: int) -> None:
    holder, waiter = pair
    os.kill(broker_pid, signal.SIGSTOP)
    holder.call("release")
    assert waiter.result()
    assert waiter.call("get", "holding")
    assert not waiter.call("get", "taken") and not waiter.call("get", "contended")
    assert not holder.call("get", "holding")
    os.kill(broker_pid, signal.SIGCONT)
    assert waiter.call("get", "holding")
    holder.start("acquire")
    assert not holder.has_answered(0.2)
    waiter.call("release")
    assert holder.result()
    assert waiter.call("stats")["lost"] == holder.call("stats")["lost"] == 0


def test_a_turn_may_end_before_the_broker_knows_of_it(
    processes: LeaseProcesses, pair: tuple[Actor, Actor], broker_pid: int
) -> None:
    holder, waiter = pair
    os.kill(broker_pid, signal.SIGSTOP)
    holder.call("release")
    assert waiter.result()
    waiter.call("release")
    os.kill(broker_pid, signal.SIGCONT)
    third_job_gets_it(processes)
    assert waiter.call("stats")["lost"] == holder.call("stats")["lost"] == 0


def test_a_holder_that_is_killed_while_it_hands_over_is_succeeded(
    processes: LeaseProcesses, pair: tuple[Actor, Actor]
) -> None:
    holder, waiter = pair
    holder.start("release_with_signal", signal.SIGKILL)
    assert waiter.result()
    holder.process.wait()
    eventually(lambda: processes.status()["resources"][0]["holder"] == "waiter")
    assert waiter.call("get", "holding")
    assert waiter.call("stats")["lost"] == 0
    third_job_gets_it(processes, waiter)


def test_a_holder_that_is_stopped_while_it_hands_over_is_succeeded(
    processes: LeaseProcesses, pair: tuple[Actor, Actor]
) -> None:
    holder, waiter = pair
    holder.start("release_with_signal", signal.SIGSTOP)
    assert waiter.result()
    waiter.call("release")  # long before the broker learns that the holder is stopped
    third_job_gets_it(processes)
    holder.signal(signal.SIGCONT)
    assert holder.result() is True
    assert processes.status()["resources"][0]["holder"] == "third"  # its release is stale


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_is_gone_when_it_is_woken_is_passed_over(
    processes: LeaseProcesses, pair: tuple[Actor, Actor], number: int
) -> None:
    holder, waiter = pair
    waiter.signal(signal.SIGSTOP)
    assert holder.call("release_with_signal", 0)
    if number == signal.SIGKILL:
        waiter.signal(number)
    third = third_job_gets_it(processes)
    if number == signal.SIGSTOP:
        waiter.signal(signal.SIGCONT)
        eventually(lambda: processes.status()["resources"][0]["waiting"] == ["waiter"])
        assert not waiter.has_answered()
        third.call("release")
        assert waiter.result()
        assert waiter.call("stats")["lost"] == 1


def test_a_broker_that_dies_in_the_middle_of_a_handover_stops_nobody(
    processes: LeaseProcesses, pair: tuple[Actor, Actor], broker_pid: int
) -> None:
    holder, waiter = pair
    os.kill(broker_pid, signal.SIGSTOP)
    holder.call("release")
    assert waiter.result()
    os.kill(broker_pid, signal.SIGKILL)
    eventually(lambda: not waiter.call("get", "holding"))
    waiter.call("release")
    processes.broker()
    for actor in pair:
        assert actor.call("wait_until_connected", 20)
    assert waiter.call("acquire")
    third_job_gets_it(processes, waiter)


def test_an_alarm_without_a_handover_gives_nobody_a_turn(processes: LeaseProcesses, pair: tuple[Actor, Actor]) -> None:
    """By a client of the same user that was introduced, but does not hold: only the page says who is next."""
    holder, waiter = pair
    for fence in (1, holder.call("get", "fence"), 1 << 63):
        assert holder.call("ring", 2, fence)
        assert not waiter.has_answered(0.1)
    while holder.call("ring", 2, 1 << 63):
        pass
    holder.call("release")
    assert waiter.result()
    third_job_gets_it(processes, waiter)


def test_the_broker_learns_of_a_handover_by_itself(processes: LeaseProcesses, pair: tuple[Actor, Actor]) -> None:
    holder, waiter = pair
    onlooker = processes.raw()
    onlooker.hello("onlooker")
    holder.call("release")
    assert waiter.result()
    fence = waiter.call("get", "fence")
    eventually(lambda: onlooker.page.fence == fence, timeout_s=2.0)
    assert onlooker.page.waiters == 0
    jobs = {job["job"]: job for job in processes.status()["resources"][0]["jobs"]}
    assert jobs["waiter"]["handoffs"] == 1


@pytest.mark.parametrize("at_s", [0.0, 1e9])
def test_a_note_that_nobody_was_promised_ends_a_hold_at_most(
    processes: LeaseProcesses, pair: tuple[Actor, Actor], at_s: float
) -> None:
    holder, waiter = pair
    holder.call("write_note", 1, 1, at_s)  # of a hold that it does not have
    assert not waiter.has_answered(0.2)
    assert holder.call("get", "holding")
    holder.call("write_note", 0, 1, at_s)
    assert waiter.result()
    assert not holder.call("get", "holding")
    third_job_gets_it(processes, waiter)
    held_s = {job["job"]: job["held_s"] for job in processes.status()["resources"][0]["jobs"]}
    assert held_s["holder"] > 0.1  # it cannot say that it has not held


def test_a_client_that_cannot_be_woken_is_granted_its_turn_by_the_broker(processes: LeaseProcesses) -> None:
    """As one of an older version."""
    processes.broker()
    actor, old = processes.actor("new", max_wait_s=1000), processes.raw()
    old.hello("old")
    assert actor.call("acquire")
    old.send(Kind.REQUEST, request=1)
    eventually(lambda: actor.call("get", "contended"))
    assert actor.call("release_with_signal", 0) is False
    grant = old.receive()
    assert (grant.kind, grant.request) == (Kind.GRANT, 1)
    actor.start("acquire")
    eventually(lambda: old.page.waiters == 1)
    assert old.page.successor(grant.fence).fence > grant.fence
    assert old.hears_nothing()
    old.send(Kind.RELEASE, fence=grant.fence)
    assert actor.result()


def test_clients_that_are_stopped_and_killed_at_any_moment_leave_nobody_waiting(processes: LeaseProcesses) -> None:
    processes.broker()
    actors = [processes.actor(name, max_wait_s=1000) for name in "abcd"]
    for actor in actors:
        actor.start("take_turns", 2.0, 0.0005, 0.0)
    for index in range(60):
        stopped = actors[index % 3]
        stopped.signal(signal.SIGSTOP)
        time.sleep(0.003)
        stopped.signal(signal.SIGCONT)
        time.sleep(0.0071)
    actors.pop(0).signal(signal.SIGKILL)
    for actor in actors:
        assert all(hold["leased"] for hold in actor.result())
    third_job_gets_it(processes)
