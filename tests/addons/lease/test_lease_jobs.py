"""Several jobs on one resource, as processes."""

from __future__ import annotations

import signal
import time
from itertools import pairwise

import pytest

from ddp_crossover.addons.lease.protocol import Kind
from lease_processes import Actor, LeaseProcesses, eventually


def _start_waiting(actor: Actor, holder: Actor) -> None:
    actor.start("acquire")
    eventually(lambda: holder.call("get", "contended"))


def test_jobs_that_come_and_go_never_hold_at_once(processes: LeaseProcesses) -> None:
    """One is killed, one stops for a while, and one comes late and ends early."""
    processes.broker()
    actors = [processes.actor(f"job {index}") for index in range(5)]
    for actor in actors:
        actor.start("take_turns", 1.5, 0.004, 0.002)
    late = processes.actor("late")
    late.start("take_turns", 1.0, 0.004, 0.002)
    time.sleep(0.3)
    killed, stopped = actors[0], actors[1]
    killed.signal(signal.SIGKILL)
    stopped.signal(signal.SIGSTOP)
    time.sleep(0.5)
    stopped.signal(signal.SIGCONT)
    holds = [(hold, actor) for actor in [*actors[1:], late] for hold in actor.result()]
    leased = sorted(
        ((hold["start"], hold["end"], actor) for hold, actor in holds if hold["leased"]), key=lambda h: h[0]
    )
    assert len({hold["fence"] for hold, _ in holds}) == len(holds)
    for (_, end, actor), (start, _, _) in pairwise(leased):
        # A stopped process could not release in time: others went on.
        assert end <= start or actor is stopped
    assert all(hold["leased"] for hold, _ in holds)
    # Nobody was left out.
    assert min(sum(actor is one for *_, one in leased) for actor in [*actors[1:], late]) > 1


def test_ranks_of_one_job_hold_together_until_the_last_releases_or_dies(processes: LeaseProcesses) -> None:
    processes.broker()
    ranks = [processes.actor("job") for _ in range(3)]
    other = processes.actor("other")
    ranks[0].call("acquire")
    _start_waiting(other, ranks[0])
    for rank in ranks[1:]:
        assert rank.call("acquire")
    assert len({rank.call("get", "fence") for rank in ranks}) == 1
    ranks[0].call("release")
    ranks[1].signal(signal.SIGKILL)
    assert not other.has_answered(0.1)
    assert ranks[2].call("get", "holding")
    ranks[2].call("release")
    assert other.result()


@pytest.mark.parametrize(("role", "limit"), [("peer", "hold_s"), ("filler", "filler_s")])
def test_who_holds_for_too_long_loses_its_hold_to_whoever_waits(
    processes: LeaseProcesses, role: str, limit: str
) -> None:
    processes.broker(limits={limit: 0.1})
    holder, waiter = processes.actor("holder", role=role), processes.actor("waiter")
    holder.call("acquire")
    holder.call("pause", 0.3)
    assert holder.call("get", "holding")  # nobody has asked for it
    assert waiter.call("acquire")
    assert not holder.call("get", "holding")
    holder.call("release")
    assert waiter.call("get", "holding")


def test_a_filler_is_asked_to_yield_to_a_peer(processes: LeaseProcesses) -> None:
    processes.broker()
    filler, main = processes.actor("filler", role="filler"), processes.actor("main")
    filler.call("acquire")
    assert not filler.call("get", "asked_to_yield")
    _start_waiting(main, filler)
    assert filler.call("get", "asked_to_yield")
    filler.start("yield_turn")
    assert main.result()
    assert not filler.has_answered(0.1)
    main.call("release")
    assert filler.result()
    assert not filler.call("get", "asked_to_yield")


def test_yielding_without_a_waiter_keeps_the_hold(processes: LeaseProcesses) -> None:
    processes.broker()
    actor = processes.actor("a")
    assert actor.call("yield_turn")  # nothing held: the same as acquire
    fence = actor.call("get", "fence")
    assert actor.call("yield_turn")
    assert actor.call("get", "fence") == fence


class _Pair:
    """Jobs a and b, which can come together, as a broker sees it, however busy the machine is."""

    def __init__(self, processes: LeaseProcesses) -> None:
        self._broker = processes.broker()
        self.first, self.last = processes.raw(), processes.raw()
        self.first.hello("a")
        self.last.hello("b")

    def ask(self, request: int) -> None:
        """Both ask for the resource, b a little earlier than a."""
        self._broker.send_signal(signal.SIGSTOP)
        for client in (self.last, self.first):
            client.send(Kind.REQUEST, request=request)
        self._broker.send_signal(signal.SIGCONT)


@pytest.fixture
def tied(processes: LeaseProcesses) -> _Pair:
    """Jobs that are away after b went first in a tie."""
    pair = _Pair(processes)
    pair.ask(1)
    time.sleep(0.4)  # a tie is a part of a hold
    for client in (pair.last, pair.first):
        client.send(Kind.RELEASE, fence=client.receive().fence)
    eventually(lambda: pair.first.page.fence == 0)
    return pair


def test_who_led_in_a_tie_stands_back(tied: _Pair) -> None:
    tied.ask(2)
    assert tied.first.receive().kind is Kind.GRANT
    assert tied.last.hears_nothing()


def test_who_stands_back_for_a_job_that_does_not_come_gets_its_turn(tied: _Pair) -> None:
    tied.last.send(Kind.REQUEST, request=2)
    assert tied.last.receive().kind is Kind.GRANT


def test_members_of_a_job_with_another_weight_run_unleased(processes: LeaseProcesses) -> None:
    processes.broker()
    processes.actor("job")
    other = processes.actor("job", weight=2.0, connect=False)
    eventually(lambda: not other.call("acquire") and "names must be unique" in str(other.call("stats")["unleased"]))
