"""What the posting thread does next, against real connections whose reader stops reading."""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from ddp_crossover.comm import gloo_threads
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.gloo_leg import GlooGatherLeg, GlooScatterLeg
from ddp_crossover.comm.gloo_threads import PostQueue
from ddp_crossover.comm.nodes import Nodes
from ddp_crossover.comm.pace import Pace, SocketBacklog
from ddp_crossover.comm.sums import ScratchPool
from tcp import drain, fill, tcp_pair

SOON_S = 10.0
# Longer than the queue naps, so that a leg which is not there by then is held back.
NOT_YET_S = 0.2
CONTEXT: Any = SimpleNamespace(open_legs=set(), nodes=Nodes.flat(0, 2), scratch=ScratchPool(), sums_in_fp32=False)

pytestmark = pytest.mark.quick


def scatter(done: bool = True) -> GlooScatterLeg:
    leg = GlooScatterLeg(CONTEXT, 0, 0, FusionBuffer(()))
    if done:
        leg.finish()
    return leg


def gather(urgency: int | None, *, done: bool = True, paced: bool = False) -> GlooGatherLeg:
    return GlooGatherLeg(CONTEXT, scatter(done), urgency, paced=paced)


class Posting(NamedTuple):
    """A queue, its connection, and what a thread has taken from the queue."""

    queue: PostQueue
    backlog: SocketBacklog
    writer: socket.socket
    reader: socket.socket
    taken: queue.SimpleQueue[Any]

    def start(self, *legs: GlooGatherLeg) -> None:
        """Put these legs, then start the posting thread, which posts nothing."""
        for leg in legs:
            self.queue.put_gather(leg)

        def take_forever() -> None:
            while (task := self.queue.next()) is not None:
                self.taken.put(task)

        threading.Thread(target=take_forever, daemon=True).start()

    def next_taken(self) -> Any:
        """What the thread has taken next; fails rather than hangs."""
        return self.taken.get(timeout=SOON_S)

    def end(self, scatter: GlooScatterLeg) -> None:
        """Its gather leg is ready."""
        scatter.finish()
        self.queue.note_ready(scatter.ended)

    def nothing_taken(self) -> bool:
        """Whether the thread waits."""
        with contextlib.suppress(queue.Empty):
            self.taken.put(self.taken.get(timeout=NOT_YET_S))
            return False
        return True


@pytest.fixture
def posting(monkeypatch) -> Iterator[Posting]:
    # Else a leg that is never let go would be handed out all the same, and a slow test would see it go too early.
    monkeypatch.setattr(gloo_threads, "_LONGEST_HOLD_S", math.inf)
    with tcp_pair() as (writer, reader):
        backlog = SocketBacklog([writer.fileno()])
        jobs = PostQueue(Pace(backlog))
        jobs.pace.s_per_byte = 8e-8  # 25 KB in 2 ms; a full socket holds far more
        yield Posting(jobs, backlog, writer, reader, queue.SimpleQueue())
        jobs.close()


def _job(number: int) -> Any:
    return lambda: number


def test_norms_go_first_then_jobs_in_order_then_gather_legs(posting) -> None:
    legs = [gather(0), gather(None)]
    jobs = [_job(number) for number in range(3)]
    posting.queue.put(jobs[1])
    posting.queue.put(jobs[2])
    posting.queue.put_urgent(jobs[0])
    posting.start(*legs)
    assert [posting.next_taken() for _ in range(5)] == [*jobs, legs[1].post, legs[0].post]


def test_a_job_overtakes_gather_legs_that_wait_for_the_link(posting) -> None:
    written = fill(posting.writer)
    leg = gather(0, paced=True)
    posting.start(leg)
    assert posting.nothing_taken()
    job = _job(0)
    posting.queue.put(job)
    assert posting.next_taken() is job
    assert posting.nothing_taken()
    drain(posting.reader, written)
    assert posting.next_taken() == leg.post


def test_the_most_urgent_gather_leg_that_is_ready_goes_first(posting) -> None:
    legs = {urgency: gather(urgency, done=urgency != 1) for urgency in (5, 1, 3, 0)}
    posting.start(*legs.values())
    assert [posting.next_taken() for _ in range(3)] == [legs[0].post, legs[3].post, legs[5].post]
    assert posting.nothing_taken()
    posting.end(legs[1].scatter)
    assert posting.next_taken() == legs[1].post


def test_one_that_becomes_ready_while_the_link_is_busy_is_chosen_if_it_is_more_urgent(posting) -> None:
    written = fill(posting.writer)
    late, early = gather(1, paced=True), gather(0, paced=True, done=False)
    posting.start(late, early)
    assert posting.nothing_taken()
    posting.end(early.scatter)
    assert posting.nothing_taken()
    drain(posting.reader, written)
    assert [posting.next_taken() for _ in range(2)] == [early.post, late.post]


@pytest.mark.parametrize("s_per_byte", [8e-8, 0.0], ids=["speed_known", "speed_unknown"])
def test_a_paced_leg_waits_for_the_link_and_an_unpaced_one_does_not(posting, s_per_byte) -> None:
    posting.queue.pace.s_per_byte = s_per_byte
    written = fill(posting.writer)
    unpaced, paced = gather(0), gather(1, paced=True)
    posting.start(paced, unpaced)
    assert posting.next_taken() == unpaced.post
    assert posting.nothing_taken()
    drain(posting.reader, written)
    assert posting.next_taken() == paced.post


def test_a_link_that_was_measured_as_far_too_slow_holds_nothing_back_for_seconds(posting) -> None:
    posting.queue.pace.s_per_byte = 1.0  # the machine stood still while it was probed
    written = fill(posting.writer)
    leg = gather(0, paced=True)
    posting.start(leg)
    assert posting.nothing_taken()
    drain(posting.reader, written)
    assert posting.next_taken() == leg.post


@pytest.fixture
def almost_dry(posting) -> Posting:
    """The link has 5 ms left to send, for ever."""
    fill(posting.writer)
    time.sleep(NOT_YET_S)  # until the reader's side is full as well
    posting.queue.pace.s_per_byte = 5e-3 / posting.backlog.unacknowledged_bytes()
    return posting


def test_a_paced_leg_goes_earlier_where_no_scatter_leg_can_follow(almost_dry) -> None:
    leg = gather(0, paced=True)
    almost_dry.start(leg)
    assert almost_dry.nothing_taken()
    almost_dry.queue.pace.is_relaxed = True
    assert almost_dry.next_taken() == leg.post


def test_no_leg_goes_earlier_while_a_more_urgent_one_is_on_its_way(almost_dry) -> None:
    almost_dry.queue.pace.is_relaxed = True
    urgent, other = gather(0, paced=True, done=False), gather(1, paced=True)
    almost_dry.start(other, urgent)
    assert almost_dry.nothing_taken()
    almost_dry.end(urgent.scatter)
    assert [almost_dry.next_taken() for _ in range(2)] == [urgent.post, other.post]


def test_a_backlog_that_never_drains_holds_a_leg_back_for_a_while_only(posting, monkeypatch) -> None:
    fill(posting.writer)
    leg = gather(0, paced=True)
    posting.start(leg)
    assert posting.nothing_taken()
    monkeypatch.setattr(gloo_threads, "_LONGEST_HOLD_S", 0.05)
    assert posting.next_taken() == leg.post


def test_after_a_failure_nothing_is_held_back(posting) -> None:
    fill(posting.writer)
    legs = [gather(urgency, paced=True) for urgency in range(2)]
    posting.start(*legs)
    assert posting.nothing_taken()
    posting.queue.stop_pacing()
    assert [posting.next_taken() for _ in range(2)] == [leg.post for leg in legs]


def test_gather_legs_without_urgency_keep_their_order(posting) -> None:
    fill(posting.writer)  # they do not ask how busy the link is
    legs = [gather(None, done=done) for done in (True, False, True)]
    posting.start(*legs)
    assert posting.next_taken() == legs[0].post
    assert posting.nothing_taken()
    posting.end(legs[1].scatter)
    assert [posting.next_taken() for _ in range(2)] == [leg.post for leg in legs[1:]]


def test_close_ends_the_thread_even_if_legs_are_left(posting) -> None:
    posting.queue.put_gather(gather(0, done=False))
    thread = threading.Thread(target=posting.queue.next, daemon=True)
    thread.start()
    posting.queue.close()
    thread.join(SOON_S)
    assert not thread.is_alive()
