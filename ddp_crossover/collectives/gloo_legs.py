"""The legs of ``gloo_link``: what is under way, and who is told when it ends. They do nothing by themselves."""

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
    """The link, as far as its legs know it."""

    clock: CommClock
    rank: int
    world_size: int
    iteration: int
    gave_up: bool

    def describe(self, label: str, error: BaseException) -> BaseException:
        """The error of a leg, in words for users."""

    def leg_is_over(self, leg: GlooLeg) -> None:
        """The leg has ended, well or not."""


class Latch:
    """An event that is set once. A signal handler may wait for it while the thread that it has interrupted does.

    ``threading.Event`` has a lock of its own, which such a handler would wait for in vain.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def set(self) -> None:
        """Let all go who wait."""
        if not self.is_set:
            self.is_set = True
            self._closed.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it is set, or for some seconds; returns whether it is set."""
        # Set before the lock is opened: who finds it taken by the thread that it has interrupted is back here at once.
        if not self.is_set and self._closed.acquire(timeout=timeout_s):
            self._closed.release()
        return self.is_set


class GlooLeg(Leg):
    """A leg whose progress other threads report through an event."""

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
            self._link.gave_up = True  # if an exception ends this wait
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
        expected: it was announced, so that its receives are posted apart, ahead of its sends.
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
    """An all-gather that starts when its scatter leg is done, and ends when nobody reads the buffer any more.

    Attributes:
        scatter: the scatter leg.
        urgency: smaller goes first among those that are ready; None keeps the order of asking.
        paced: only when the link has nothing else to send.
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
            self.on_done = None  # it refers to this leg, which would keep its sockets open after the link was closed
