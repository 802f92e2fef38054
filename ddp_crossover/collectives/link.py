"""The interface of a link, which runs legs.

A :class:`Link` runs legs on its own process group: ``gloo_link`` by peer exchange from threads, ``nccl_link`` on a
CUDA stream. Neither knows of DDP, parameters or optimizers.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.collectives.leg import Leg, ScatterLeg
from ddp_crossover.collectives.meter import LinkMeter
from ddp_crossover.tracing.clock import CommClock

MAX_GROUPS = 2**16 - 1


class Link(ABC):
    """Runs legs on one process group.

    Attributes:
        process_group: the process group, used by the link only.
        owns_process_group: whether closing the link destroys the process group.
        rank: this process' rank in the group.
        world_size: number of ranks in the group.
        meter: the clock of the legs, and the bytes that they have sent.
        orders_gathers: whether ranks may send gather legs in different orders, so that the link chooses the order.
        has_fused_all_reduce: whether an all-reduce is one operation, not a scatter and a gather leg.
        is_closed: whether the link is closed, so that no leg can be started.
    """

    process_group: dist.ProcessGroup
    owns_process_group: bool = False
    rank: int
    world_size: int
    meter: LinkMeter
    orders_gathers: bool = False
    has_fused_all_reduce: bool = True
    is_closed: bool = False

    @property
    def clock(self) -> CommClock:
        """Measures times of legs and waits."""
        return self.meter.clock

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent so far."""
        return self.meter.sent_bytes

    @abstractmethod
    def reduce_scatter(self, group: int, buffer: Tensor) -> ScatterLeg:
        """Start to sum ``buffer`` (flat, contiguous) over ranks; each rank keeps its own slice of the sum.

        Never blocks. ``buffer`` belongs to the link until the gather leg has ended.
        """

    def expect(self, group: int, buffer: Tensor) -> None:  # noqa: B027  (nothing to do if legs match by their order)
        """Announce a scatter leg of this group in this iteration, so that faster peers can send already."""

    @abstractmethod
    def all_gather(self, scatter: ScatterLeg, urgency: int | None = None) -> Leg:
        """Start to send every rank's slice to every rank, as soon as ``scatter`` is done. Never blocks.

        Args:
            scatter: the scatter leg of the same group.
            urgency: if :attr:`orders_gathers`, legs that are ready are sent in this order (smaller first) when the
                link would be idle. None: in the order of the calls.
        """

    def soon(self, job: Callable[[], None]) -> None:
        """Run ``job`` before any leg that is started later, possibly on another thread; on CUDA at once."""
        job()

    def finish_jobs(self) -> None:  # noqa: B027  (nothing to wait for if jobs run at once)
        """Wait until all jobs given to :meth:`soon` have run."""

    def set_pace(self, s_per_byte: float) -> None:  # noqa: B027  (a fixed order needs no pace)
        """Set how many seconds the link takes to send a byte, from which it tells when it runs idle."""

    def all_reduce_leg(self, group: int, buffer: Tensor) -> ScatterLeg:
        """Start both legs as one, if :attr:`has_fused_all_reduce`; afterwards the whole buffer holds the sum."""
        raise NotImplementedError

    @property
    def all_reduce_stream(self) -> torch.cuda.Stream | None:
        """Stream for :func:`all_reduce_sum` on another process group, usable even after the link is closed."""
        return None

    @abstractmethod
    def all_reduce(self, group: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Start to all-reduce ``buffer`` in place; the future's value is ``buffer``, summed over ranks."""

    @abstractmethod
    def all_gather_small(self, value: Tensor) -> Tensor:
        """Gather a small tensor from all ranks, in rank order; shape ``(world_size, *value.shape)``."""

    @abstractmethod
    def next_iteration(self) -> None:
        """Begin the next training iteration, to which all legs started from now on belong."""

    def all_scattered(self) -> None:  # noqa: B027  (matters only if the link orders the legs)
        """Note that no scatter leg follows in this iteration."""

    def adopt(self, buffer: Tensor) -> None:  # noqa: B027  (only CUDA memory needs this)
        """Prepare memory for use by legs, so that it may be dropped while the last leg is still under way."""

    def prepare(self, memory: Tensor) -> None:  # noqa: B027  (nothing to do if groups connect when created)
        """Create connections now instead of at the first legs, by legs in ``memory``. All ranks must call it."""

    def forget_sizes(self) -> None:  # noqa: B027  (only links that keep memory need this)
        """Free memory kept for the sizes of past legs, because other sizes follow. No leg may be under way."""

    def current_stream(self) -> torch.cuda.Stream | None:
        """The caller's current CUDA stream; None on CPU, where work is done in the order of the calls."""
        return None

    def shut_down(self) -> None:
        """Close the link at the end of the program, or when the model is garbage-collected."""
        self.close()

    def close(self) -> None:
        """Release the process group, after the legs under way have ended."""
        if self.owns_process_group:
            self.owns_process_group = False
            release(self.process_group)
        del self.process_group  # dropping the last reference closes its sockets


def release(process_group: dist.ProcessGroup) -> None:
    """Destroy a process group, unless the user's ``destroy_process_group()`` has already destroyed it."""
    with contextlib.suppress(ValueError):
        dist.destroy_process_group(process_group)
