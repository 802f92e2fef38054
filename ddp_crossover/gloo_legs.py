"""The legs of ``gloo_link``: what is under way, and who is told when it ends. They do nothing by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from ddp_crossover.collectives import Leg, ScatterLeg, slice_bounds

if TYPE_CHECKING:
    from ddp_crossover.gloo_link import GlooLink


class GlooLeg(Leg):
    """A leg whose progress other threads report through an event."""

    def __init__(self, link: GlooLink, label: str) -> None:
        self.label = label
        self._link = link
        self._done = threading.Event()
        self._drained = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        self._await(self._done)

    def drain(self) -> None:
        self._await(self._drained)

    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        self._error = self._error or error
        self._done.set()
        if error is not None:
            self.finish_drain()

    def finish_drain(self) -> None:
        self._drained.set()

    def _await(self, event: threading.Event) -> None:
        if not event.is_set():
            start_s = time.perf_counter()
            event.wait()
            self._link.clock.exposed_s += time.perf_counter() - start_s
        if self._error is not None:
            raise self._link.describe(self.label, self._error) from self._error


class GlooScatterLeg(GlooLeg, ScatterLeg):
    """A reduce-scatter, and the receives of the all-gather that will follow it."""

    def __init__(self, link: GlooLink, group: int, buffer: Tensor) -> None:
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
    """An all-gather that starts when its scatter leg is done."""

    def __init__(self, link: GlooLink, scatter: GlooScatterLeg) -> None:
        super().__init__(link, f"gather leg of fusion group {scatter.group}")
        self.scatter = scatter
        self.on_drained: Callable[[BaseException | None], None] | None = None

    def finish_drain(self) -> None:
        super().finish_drain()
        self._link.gather_drained()
        if self.on_drained is not None:
            on_drained, self.on_drained = self.on_drained, None
            on_drained(self._error)
