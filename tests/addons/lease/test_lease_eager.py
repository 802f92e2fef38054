"""`acquire(eager=True)`: a free resource is held as soon as it has been asked for."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from ddp_crossover.addons.lease.client import GpuLease
from ddp_crossover.addons.lease.protocol import Kind
from lease_processes import LeaseProcesses, eventually


def test_it_is_held_until_it_is_released(processes: LeaseProcesses, lease: GpuLease) -> None:
    other = processes.actor("other")
    assert lease.acquire(eager=True) and lease.holding
    # Until the broker has read the request, it may read that of another job first.
    eventually(lambda: processes.status()["resources"][0]["holder"])
    other.start("acquire")
    eventually(lambda: lease.contended)
    assert lease.holding and not other.has_answered()
    lease.release()
    assert not lease.holding
    assert other.result()


def test_who_may_have_to_stand_back_waits_for_the_answer(processes: LeaseProcesses, lease: GpuLease) -> None:
    first = processes.raw()
    first.hello("a")
    assert lease.acquire(eager=True) and lease.fence == 0
    eventually(lambda: first.page.fence)
    first.send(Kind.REQUEST, request=1)
    time.sleep(0.4)  # a tie is a part of a hold
    lease.release()
    first.send(Kind.RELEASE, fence=first.receive().fence)
    eventually(lambda: not lease.taken)
    assert lease.acquire(eager=True) and lease.fence > 0


def test_it_waits_for_whoever_holds_it(processes: LeaseProcesses, lease: GpuLease) -> None:
    other = processes.actor("other")
    other.start("hold_for", 0.2)
    eventually(lambda: lease.taken)
    assert lease.acquire(eager=True)
    assert lease.fence > other.result()["fence"]


def test_answers_that_nobody_waits_for_do_not_pile_up(processes: LeaseProcesses, lease: GpuLease) -> None:
    other = processes.actor("other")
    for _ in range(2000):
        assert lease.acquire(eager=True)
        lease.release()
    assert lease.connected and lease.stats().unleased == {} and lease.stats().lost == 0
    assert other.call("acquire")


def test_turns_are_yielded_although_their_number_is_not_known(processes: LeaseProcesses, lease: GpuLease) -> None:
    other = processes.actor("other")
    assert lease.acquire(eager=True)
    other.start("hold_for", 0.05)
    eventually(lambda: lease.contended)
    assert lease.yield_turn()
    assert lease.fence > other.result()["fence"]


def another_job_is_faster(processes: LeaseProcesses, lease: GpuLease) -> tuple[Any, int]:
    """Both ask for what is free. Returns the other job, and the fence under which it holds."""
    other = processes.raw()
    other.hello("other")
    pid = processes.status()["pid"]
    broker = next(broker for broker in processes._brokers if broker.pid == pid)
    broker.send_signal(signal.SIGSTOP)
    other.send(Kind.REQUEST, request=1)
    assert lease.acquire(eager=True) and lease.holding
    broker.send_signal(signal.SIGCONT)
    grant = other.receive()
    assert grant.kind is Kind.GRANT
    eventually(lambda: not lease.holding)
    return other, grant.fence


def test_where_another_job_was_faster_it_is_not_held(processes: LeaseProcesses, lease: GpuLease) -> None:
    other, fence = another_job_is_faster(processes, lease)

    def release() -> None:
        # Not before the lease has seen that another job holds: then it would simply be next.
        eventually(lambda: lease.stats().lost == 1)
        other.send(Kind.RELEASE, fence=fence)

    releasing = threading.Thread(target=release)
    releasing.start()
    assert lease.acquire()
    releasing.join()
    assert lease.fence > fence
    assert lease.stats().lost == 1


def test_where_another_job_was_faster_and_nobody_asks_again_no_turn_comes_later(
    processes: LeaseProcesses, lease: GpuLease
) -> None:
    other, fence = another_job_is_faster(processes, lease)
    lease.release()
    eventually(lambda: not other.page.waiters)
    other.send(Kind.RELEASE, fence=fence)
    eventually(lambda: not other.page.fence)
    assert processes.status()["resources"][0]["waiting"] == []


def test_it_ends_with_the_broker(processes: LeaseProcesses, lease: GpuLease) -> None:
    assert lease.acquire(eager=True)
    processes._brokers[0].kill()
    eventually(lambda: not lease.holding)
    assert not lease.acquire(eager=True)
    lease.release()
