"""What the posting thread of ``gloo_link`` does next.

Work that cannot wait comes first: exchanges of norms, then staging and scatter legs in the order in which they were
asked for. Gather legs fill what is left of the link. Those of the planned schedule are posted as they become ready,
the most urgent first, and only when the link has next to nothing left to send: a gather leg in the socket buffer stands
in front of every later scatter leg. Those of the paper's schedule keep the order in which they were asked for.
"""

from __future__ import annotations

import contextlib
import queue
import time
from bisect import insort
from collections import deque
from collections.abc import Callable

from ddp_crossover.collectives.gloo_legs import GlooGatherLeg
from ddp_crossover.collectives.socket_backlog import SocketBacklog

Job = Callable[[], None]
_Order = Callable[[], None]

# Posted this long before the link runs dry: a thread needs part of it to wake up.
_LEAD_S = 2e-3
# Where nothing can come that would have to wait behind it.
_RELAXED_LEAD_S = 8e-3
# Where the speed of the link is not known yet.
_LEAD_BYTES = 2**18
# The kernel does not tell when it has sent something, so it has to be asked again.
_SHORTEST_NAP_S = 2e-4
_YIELD_S = 1e-4
# Pacing only ever costs overlap, so it may not hold a leg back for long: the backlog may be of a peer that is dead.
_LONGEST_HOLD_S = 1.0


class Pace:
    """When the link has next to nothing left to send.

    Attributes:
        s_per_byte: how long the link takes to send a byte; 0 while that is not known.
        is_relaxed: no scatter leg follows in this iteration.

    Args:
        backlog: of the link's sockets.
    """

    def __init__(self, backlog: SocketBacklog) -> None:
        self.s_per_byte = 0.0
        self.is_relaxed = False
        self._backlog = backlog

    def idle_in_s(self, *, is_most_urgent: bool) -> float:
        """0 if it is time to post a gather leg, else in how many seconds to ask again.

        Args:
            is_most_urgent: no gather leg that is still to be posted goes before it.
        """
        # The gather leg that the next forward waits for first comes last of all: 8 ms of others in front of it are 8 ms
        # of every step.
        lead_s = _RELAXED_LEAD_S if self.is_relaxed and is_most_urgent else _LEAD_S
        lead_bytes = lead_s / self.s_per_byte if self.s_per_byte else _LEAD_BYTES
        too_much_bytes = self._backlog.unacknowledged_bytes() - lead_bytes
        return max(too_much_bytes * self.s_per_byte, _SHORTEST_NAP_S) if too_much_bytes > 0 else 0.0


class PostQueue:
    """Jobs for the posting thread, from any thread.

    What is put comes through an inbox that takes no lock in Python: a signal handler may interrupt the thread that
    puts something, and wait for a leg that only the posting thread can bring on its way.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._inbox: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._is_pacing = True
        # The posting thread's own.
        self._urgent: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._in_order: deque[GlooGatherLeg] = deque()
        self._as_ready: list[GlooGatherLeg] = []
        self._is_closed = False
        self._held: tuple[GlooGatherLeg | None, float] = (None, 0.0)

    def put_urgent(self, job: Job) -> None:
        """Ahead of everything else."""
        self._inbox.put(lambda: self._urgent.append(job))

    def put(self, job: Job) -> None:
        """After the jobs that were put before, ahead of gather legs."""
        self._inbox.put(lambda: self._jobs.append(job))

    def put_gather(self, leg: GlooGatherLeg) -> None:
        """When its scatter leg is done, and the schedule says so."""
        self._inbox.put(lambda: self._sort_in(leg))

    def look_again(self) -> None:
        """A scatter leg has ended: a gather leg may have become ready."""
        self._inbox.put(lambda: None)

    def stop_pacing(self) -> None:
        """The link has failed: whatever is left fails at once."""
        self._is_pacing = False
        self.look_again()

    def close(self) -> None:
        """Let the posting thread end."""
        self._inbox.put(self._close)

    def next(self) -> Job | GlooGatherLeg | None:
        """Wait for something to do; None once closed. For the posting thread only."""
        while True:
            while not self._inbox.empty():
                self._inbox.get()()
            for jobs in (self._urgent, self._jobs):
                if jobs:
                    return jobs.popleft()
            if self._in_order and self._in_order[0].scatter.is_done():
                return self._in_order.popleft()
            place = next((i for i, leg in enumerate(self._as_ready) if leg.scatter.is_done()), None)
            wait_s = None
            if place is not None:
                leg = self._as_ready[place]
                held = leg.paced and not self._is_closed and not self._held_for_long(leg)
                wait_s = self.pace.idle_in_s(is_most_urgent=place == 0) if held else 0.0
                if not wait_s:
                    self._held = (None, 0.0)  # a leg holds its buffer
                    return self._as_ready.pop(place)
            if self._is_closed:
                return None
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=wait_s)()
                if self._jobs:
                    # The training thread has just handed something over and wants to go on. On a host with few cores,
                    # or with the interpreter's lock in hand, this thread would stand in its way.
                    time.sleep(_YIELD_S)

    def _sort_in(self, leg: GlooGatherLeg) -> None:
        if leg.urgency is None:
            self._in_order.append(leg)
        else:
            insort(self._as_ready, leg, key=lambda one: one.urgency or 0)

    def _close(self) -> None:
        self._is_closed = True

    def _held_for_long(self, leg: GlooGatherLeg) -> bool:
        if self._held[0] is not leg:
            self._held = (leg, time.monotonic())
        return not self._is_pacing or time.monotonic() - self._held[1] > _LONGEST_HOLD_S
