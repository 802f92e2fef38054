"""Training whose forwards are held for another job, and faults in each moment of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ddp_crossover.addons.lease.client.connection import BrokerConnection
from ddp_crossover.addons.lease.protocol import Message
from ddp_crossover.addons.lease.sharing.forward_times import Moment
from ddp_crossover.addons.lease.sharing.gap import Gap
from ddp_crossover.addons.lease.sharing.held_forward import HeldForward
from ddp_crossover.addons.lease.sharing.turn_points import TurnPoints
from ddp_crossover.comm.gloo_leg import GlooGatherLeg
from lease_processes import Actor, LeaseProcesses
from lease_training import Job, make_lease, same

STEPS = 20  # as many as are with the lease before some without it are compared with them
APART_S = 4e-3
GROUPS = 8

BEFORE_RELEASE = "before the release"
RELEASED = "while another job has the device"
ASKING = "while it asks for the device"
ACQUIRED = "before it uses the device"
MOMENTS = (BEFORE_RELEASE, RELEASED, ASKING, ACQUIRED)


@contextmanager
def slow_legs() -> Iterator[None]:
    """The gather leg of each group ends later than that of the group before it, as on a slow link."""
    complete = GlooGatherLeg._complete

    def late(leg: GlooGatherLeg, number: int = 0) -> None:
        # The last group is used first.
        time.sleep(APART_S * max(1, GROUPS - leg.group))
        complete(leg, number)

    with mock.patch.object(GlooGatherLeg, "_complete", late):
        yield


def train_on_slow_legs(directory: str | None, steps: int) -> tuple[Any, Any]:
    """Parameters and statistics."""
    with slow_legs():
        job = Job(None if directory is None else make_lease(directory))
        for _ in range(steps):
            job.step()
        stats = job.state.stats()
        return job.end(), stats


def assert_bits(seen: Any, expected: Any) -> None:
    for (parameters, stats), (plain, _) in zip(seen, expected, strict=True):
        assert same(parameters, plain)
        assert stats.iterations == STEPS


def others(processes: LeaseProcesses, seconds: float = 20.0, **options: Any) -> list[Actor]:
    """A job that wants both ranks' devices all the time, in turns that are shorter than what is held."""
    actors = [processes.actor("other", resource=f"cpu:{rank}", **options) for rank in range(2)]
    for actor in actors:
        actor.start("take_turns", seconds, 3e-3, 5e-4)
    return actors


@contextmanager
def strike_at(moment: str, strike: Callable[[], None]) -> Iterator[None]:
    """Call ``strike`` once, where this process comes to this moment of a held forward while another job is around.

    The first held forward only shows that the next ones will be held.
    """
    is_held, held_before, has_struck = False, 0, False

    def passes(now: str) -> None:
        nonlocal has_struck
        if now == moment and held_before and not has_struck:
            has_struck = True
            strike()

    backward_ends, hold_until = TurnPoints.backward_ends, Gap.hold_until
    receive, ended_wait = BrokerConnection.receive, HeldForward.ended_wait

    def before_release(points: TurnPoints) -> None:
        lease = points._turns._holder.lease
        if lease.holding and lease.contended:
            passes(BEFORE_RELEASE)
        backward_ends(points)

    def holds(gap: Gap, ends_s: float, is_over: Callable[[], bool]) -> None:
        nonlocal is_held

        def is_over_now() -> bool:
            if gap._holder.lease.taken:
                passes(RELEASED)
            return is_over()

        is_held = True
        hold_until(gap, ends_s, is_over_now)

    def waits_for_grant(connection: BrokerConnection, request: int, alone: bool) -> Message | None:
        if is_held and not alone:
            passes(ASKING)
        return receive(connection, request, alone)

    def before_use(forward: HeldForward, before: Moment | None, gap: Gap, granted_after_s: float) -> None:
        nonlocal is_held, held_before
        if is_held and forward._holder.lease.holding:
            passes(ACQUIRED)
        held_before += is_held
        is_held = False
        ended_wait(forward, before, gap, granted_after_s)

    with ExitStack() as patches:
        for owner, name, spy in (
            (TurnPoints, "backward_ends", before_release),
            (Gap, "hold_until", holds),
            (BrokerConnection, "receive", waits_for_grant),
            (HeldForward, "ended_wait", before_use),
        ):
            patches.enter_context(mock.patch.object(owner, name, spy))
        yield
    assert has_struck, f"no forward came to the moment {moment!r}; {held_before} were held"
