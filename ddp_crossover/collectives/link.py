"""What a link must offer to run legs.

A :class:`Link` runs legs on a process group of its own. ``gloo_link`` does it by peer exchange from threads,
``nccl_link`` on a CUDA stream. Neither knows of DDP, parameters or optimizers.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.collectives.leg import Leg, ScatterLeg
from ddp_crossover.tracing.clock import CommClock

MAX_GROUPS = 2**16 - 1


class Link(ABC):
    """Runs legs on one process group.

    Attributes:
        process_group: the group, not used by anybody else.
        owns_process_group: whether to destroy the group along with the link.
        rank: this process' rank in the group.
        world_size: ranks in the group.
        sent_bytes: payload bytes that this rank has sent so far.
        clock: times of legs and waits.
        orders_gathers: gather legs may leave ranks in different orders, so the link chooses as it goes.
        has_fused_all_reduce: an all-reduce is one operation, not a scatter and a gather leg.
        sums_in_fp32: whether 16-bit buffers are added up in fp32 and rounded once; a backend that adds by itself
            does not ask.
        gave_up: the last wait for a leg was broken off by an exception, such as KeyboardInterrupt.
        is_closed: no leg can be started any more.
    """

    process_group: dist.ProcessGroup
    owns_process_group: bool = False
    sums_in_fp32: bool = False
    rank: int
    world_size: int
    sent_bytes: int
    clock: CommClock
    orders_gathers: bool = False
    has_fused_all_reduce: bool = True
    gave_up: bool = False
    is_closed: bool = False

    @abstractmethod
    def reduce_scatter(self, group: int, buffer: Tensor) -> ScatterLeg:
        """Start to sum ``buffer`` (flat, contiguous) over ranks; each rank keeps its own slice of the sum.

        Never blocks. ``buffer`` belongs to the link until the gather leg is over.
        """

    def expect(self, group: int, buffer: Tensor) -> None:  # noqa: B027  (where the order of calls is all that counts)
        """A scatter leg of this group will follow in this iteration: peers that are ahead may send already."""

    @abstractmethod
    def all_gather(self, scatter: ScatterLeg, urgency: int | None = None) -> Leg:
        """Start to hand every rank's slice to every rank, as soon as ``scatter`` is done. Never blocks.

        Args:
            scatter: the scatter leg of the same group.
            urgency: where ranks may differ in the order of gather legs, those that are ready leave in this order
                (smaller first) when the link would be idle. None: in the order of the calls.
        """

    def soon(self, job: Callable[[], None]) -> None:
        """Run ``job`` before any leg that is started later; maybe on another thread. On CUDA at once, on the stream."""
        job()

    def finish_jobs(self) -> None:  # noqa: B027  (nothing to wait for where jobs run at once)
        """Wait until all jobs given to :meth:`soon` have run."""

    def set_pace(self, s_per_byte: float) -> None:  # noqa: B027  (a fixed order needs no pace)
        """Tell how long the link takes to send a byte, so that it is known when it is idle."""

    def all_reduce_leg(self, group: int, buffer: Tensor) -> ScatterLeg:
        """Both legs as one, where :attr:`has_fused_all_reduce`; after it the whole buffer holds the sum."""
        raise NotImplementedError

    @property
    def all_reduce_stream(self) -> torch.cuda.Stream | None:
        """For :func:`all_reduce_sum` on another group, also when the link is closed."""
        return None

    @abstractmethod
    def all_reduce(self, group: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Both legs in a row; the future delivers ``buffer``, summed over ranks in place."""

    @abstractmethod
    def all_gather_small(self, value: Tensor) -> Tensor:
        """Every rank's ``value`` stacked in rank order, shape ``(world_size, *value.shape)``."""

    @abstractmethod
    def next_iteration(self) -> None:
        """Legs started from now on belong to the next training iteration."""

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """What is sent within is no training: figures are left as they were."""
        sent_bytes, clock = self.sent_bytes, self.clock
        self.clock = CommClock()
        try:
            yield
        finally:
            self.sent_bytes, self.clock = sent_bytes, clock

    def all_scattered(self) -> None:  # noqa: B027  (only where it matters for the order of legs)
        """No scatter leg follows in this iteration."""

    def adopt(self, buffer: Tensor) -> None:  # noqa: B027  (memory that is not CUDA's needs nothing)
        """Legs are going to use this memory. It may be dropped while the last of them is still under way."""

    def prepare(self, memory: Tensor) -> None:  # noqa: B027  (where groups are connected when they are made)
        """Make now what the backend would make at the first legs, by way of legs in ``memory``. All ranks call it."""

    def forget_sizes(self) -> None:  # noqa: B027  (memory is kept only where receives need it)
        """Legs of other sizes follow: give up the memory that was kept for those so far. No leg may be under way."""

    def current_stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream that the caller works on; None where work is done in the order of the calls."""
        return None

    def shut_down(self) -> None:
        """Close at the end of the program, or when the model has been dropped."""
        self.close()

    def close(self) -> None:
        """Release the process group, after the legs that are under way."""
        if self.owns_process_group:
            self.owns_process_group = False
            release(self.process_group)
        del self.process_group  # which closes its sockets


def release(process_group: dist.ProcessGroup) -> None:
    """Destroy a process group, unless the user's own ``destroy_process_group()`` has taken it already."""
    with contextlib.suppress(ValueError):
        dist.destroy_process_group(process_group)
