"""The legs of ``gloo_link``: the state of each operation and its completion. The link's threads do the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ddp_crossover.collectives.leg import Leg, Meanwhile, ScatterLeg, slice_bounds
from ddp_crossover.own_threads import refuse_to_wait
from ddp_crossover.tracing.clock import CommClock, LegTimes


class LegOwner(Protocol):
    """The part of the link that its legs use."""

    clock: CommClock
    rank: int
    world_size: int
    iteration: int
    gave_up: bool

    def describe(self, label: str, error: BaseException) -> BaseException:
        """Convert the error of a leg to one with a message for users."""

    def leg_is_over(self, leg: GlooLeg) -> None:
        """Note that the leg has ended, whether it succeeded or failed."""


class Latch:
    """An event that is set once. A signal handler may wait for it even if it interrupted a wait for the same event.

    ``threading.Event`` would deadlock there: the interrupted wait may hold its internal lock.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def set(self) -> None:
        """Set the event and wake all waiters."""
        if not self.is_set:
            self.is_set = True
            self._closed.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it is set, or for ``timeout_s`` seconds (-1: no limit); returns whether it is set."""
        # set() assigns is_set before it releases the lock. Each waiter takes the lock and passes it on; a signal
        # handler that interrupts a waiter in between sees is_set, and does not try to take the lock.
        if not self.is_set and self._closed.acquire(timeout=timeout_s):
            self._closed.release()
        return self.is_set


class GlooLeg(Leg):
    """A leg whose end other threads report through a :class:`Latch`."""

    group = -1
    is_gather = False
    times: LegTimes

    def __init__(self, link: LegOwner, label: str) -> None:
        self.label = label
        self._link = link
        self._done = Latch()
        self._error: BaseException | None = None

    def wait(self, meanwhile: Meanwhile | None = None) -> None:
        if not self._done.is_set:
            refuse_to_wait()
            start_s = time.perf_counter()
            self._link.gave_up = True  # stays True if an exception ends this wait
            while not self._done.wait(-1 if meanwhile is None else meanwhile()):
                pass
            self._link.gave_up = False
            self._link.clock.waited(start_s, self.label, self.group, for_gather=self.is_gather)
        if self._error is not None:
            raise self._link.describe(self.label, self._error) from self._error

    def is_done(self) -> bool:
        return self._done.is_set

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()
        self._link.leg_is_over(self)


class GlooScatterLeg(GlooLeg, ScatterLeg):
    """A reduce-scatter, and the receives of the all-gather that will follow it.

    Attributes:
        expected: whether ``Link.expect`` announced it; then its receives are posted earlier, separately from its sends.
    """

    expected = False

    def __init__(self, link: LegOwner, group: int, buffer: Tensor) -> None:
        super().__init__(link, f"scatter leg of fusion group {group}")
        self.group = group
        self.buffer = buffer
        self.iteration = link.iteration
        self.incoming: list[Tensor] = []
        self.scatter_receives: list[dist.Work] = []
        self.gather_receives: list[dist.Work] = []
        self.sends: list[dist.Work] = []

    def shard(self) -> Tensor:
        return self.slice_of(self._link.rank)

    def slice_of(self, rank: int) -> Tensor:
        low, high = slice_bounds(self.buffer.numel(), self._link.world_size, rank)
        return self.buffer[low:high]

    def before_posting(self) -> None:
        """Make the buffer ready to be sent; runs on the posting thread."""


class GlooGatherLeg(GlooLeg):
    """An all-gather that starts when its scatter leg is done, and ends when our sends from the buffer are done, too.

    Attributes:
        scatter: the scatter leg of the same group.
        urgency: of the legs that are ready, the one with the smallest urgency is posted first; None keeps the order
            of the calls.
        paced: whether to post it only when the link has almost nothing left to send.
    """

    is_gather = True

    def __init__(
        self, link: LegOwner, scatter: GlooScatterLeg, urgency: int | None = None, *, paced: bool = True
    ) -> None:
        super().__init__(link, f"gather leg of fusion group {scatter.group}")
        self.scatter = scatter
        self.urgency = urgency
        self.paced = paced
        self.group = scatter.group
        self.on_done: Callable[[BaseException | None], None] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        if self.on_done is not None:
            self.on_done(error)
            self.on_done = None  # break the reference cycle, which would keep the sockets open after the link is closed
