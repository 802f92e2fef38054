"""The interface of a link, which runs legs.

A :class:`Link` runs legs on its own process group: ``gloo_link`` by peer exchange from threads, ``nccl_link`` on a
CUDA stream. Neither knows of DDP, parameters or optimizers.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover import device as gpu
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.gloo_leg import AnnouncedLegs
from ddp_crossover.comm.gloo_threads import StagingQueue
from ddp_crossover.comm.leg import Leg, ScatterLeg
from ddp_crossover.comm.meter import LinkMeter
from ddp_crossover.comm.nodes import Nodes
from ddp_crossover.comm.pace import Pace
from ddp_crossover.comm.stream_order import CudaStreams
from ddp_crossover.report.clock import CommClock
from ddp_crossover.torch_internals.groups import OwnedGroups


class Link(ABC):
    """Runs legs on one process group.

    What only some links need is a part, which is None on the others. Links differ in their parts, and in the abstract
    methods below.

    Attributes:
        process_group: the process group, used by the link only.
        owned_groups: process groups that end with the link.
        rank: this process' rank in the group.
        world_size: number of ranks in the group.
        iteration: number of the training iteration to which legs that are started now belong.
        meter: the clock of the legs, and the bytes that they have sent.
        adds_in_rank_order: whether sums do not depend on the backend's algorithm.
        nodes: which ranks exchange slices with each other.
        codes_on_host: whether slices that travel as codes are encoded on the CPU, where the host knows the results.
        takes_parts: whether a fusion buffer may have several parts of any size, and a factor. If not, it is one part,
            whose size is a multiple of the world size.
        shard_align_bytes: multiple of bytes that this rank's part of a fusion buffer should be.
        spins_on_device: whether legs run in kernels of the device, which spin while they wait for peers.
        has_fused_all_reduce: whether an all-reduce is one operation, not a scatter and a gather leg.
        all_reduce_stream: stream for :func:`all_reduce_sum` on another process group, which stays usable after the
            link is closed; None if that function needs none.
        is_closed: whether the link is closed, so that no leg can be started.
        staging: stages gradients on another thread. None: the caller does, and on CUDA its stream keeps the order.
        early_receives: posts receives ahead of scatter legs. None: legs match by their order, or begin with a copy.
        pace: when the link, which chooses the order of gather legs by itself, posts them. None: all ranks must start
            gather legs in the same order.
        streams: the CUDA streams of the legs; None on CPU, where work is done in the order of the calls.
    """

    adds_in_rank_order: bool = False
    codes_on_host: bool = True
    takes_parts: bool = False
    shard_align_bytes: int = 1
    spins_on_device: bool = False
    has_fused_all_reduce: bool = False
    all_reduce_stream: gpu.Stream | None = None
    is_closed: bool = False
    staging: StagingQueue | None = None
    early_receives: AnnouncedLegs | None = None
    pace: Pace | None = None
    streams: CudaStreams | None = None

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.owned_groups = OwnedGroups()
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.nodes = Nodes.flat(self.rank, self.world_size)
        self.iteration = 0
        self.meter = LinkMeter()

    @property
    def shard(self) -> int:
        """Number of the slice that this rank reduces, of as many as there are ranks."""
        return self.nodes.shard_of[self.rank]

    @property
    def clock(self) -> CommClock:
        return self.meter.clock

    @property
    def sent_bytes(self) -> int:
        return self.meter.sent_bytes

    @property
    def chooses_gather_order(self) -> bool:
        """Whether ranks may send gather legs in different orders, so that the link chooses the order."""
        return self.pace is not None

    # Every link has its own way to run legs.

    @abstractmethod
    def reduce_scatter(self, group: int, buffer: FusionBuffer, landing: FusionBuffer | None = None) -> ScatterLeg:
        """Start to sum ``buffer`` over ranks; each rank keeps its own slices of the sum.

        Never blocks. ``buffer`` and ``landing`` belong to the link until the gather leg has ended.

        Args:
            group: number of the fusion group.
            buffer: its fusion buffer.
            landing: what the gather leg sends the slices of; by default ``buffer``. Its parts have the same sizes.
        """

    @abstractmethod
    def all_gather(self, scatter: ScatterLeg, urgency: int | None = None) -> Leg:
        """Send every rank's slice to every rank once ``scatter`` is done, or later where this link paces. Never blocks.

        On CUDA it first waits for the work that the current stream has got, if ``scatter`` has a landing.

        Args:
            scatter: the scatter leg of the same group.
            urgency: if :attr:`chooses_gather_order`, legs that are ready are sent in this order (smaller first) when
                the link would be idle. None: in the order of the calls.
        """

    @abstractmethod
    def all_reduce(self, group: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Start to all-reduce ``buffer`` in place; the future's value is ``buffer``, summed over ranks."""

    def all_reduce_leg(self, group: int, buffer: FusionBuffer) -> ScatterLeg:
        """Start both legs as one, if :attr:`has_fused_all_reduce`; afterwards the whole buffer holds the sum."""
        raise NotImplementedError("this link has no fused all-reduce: a plan for it splits every group into two legs")

    @abstractmethod
    def all_gather_small(self, value: Tensor) -> Tensor:
        """Gather a small tensor from all ranks, in rank order; shape ``(world_size, *value.shape)``."""

    @abstractmethod
    def exchange_numbers(self, value: int) -> Callable[[], list[int]]:
        """Send one number to all ranks; returns a function that waits for theirs, and has all in rank order."""

    # An iteration, in the order of the calls.

    def begin_iteration(self) -> None:
        """Begin the next training iteration, to which all legs started from now on belong."""
        self.iteration += 1
        if self.pace is not None:
            self.pace.begin_iteration()

    def announce(self, group: int, buffer: FusionBuffer) -> None:
        """Announce a scatter leg of this group in this iteration, so that faster peers can send already."""
        if self.early_receives is not None:
            self.early_receives.post(self.iteration, group, buffer)

    def stage(self, job: Callable[[], None]) -> None:
        """Run ``job``, which fills fusion buffers, before any leg that is started later."""
        if self.staging is not None:
            self.staging.put(job)
        else:
            job()

    def finish_staging(self) -> None:
        """Wait until all jobs given to :meth:`stage` have run."""
        if self.staging is not None:
            self.staging.finish()

    def end_scatter_legs(self) -> None:
        """Note that no scatter leg follows in this iteration."""
        if self.pace is not None:
            self.pace.relax()

    # Memory, speed and streams.

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate an arena, before :meth:`connect`: flat, uninitialized, in the same order on all ranks."""
        return torch.empty(numel, dtype=dtype, device=device)

    def use_nodes(self, nodes: Nodes) -> None:  # noqa: B027
        """Exchange slices as ``nodes`` says, if the link does not choose by itself. No leg may have been started."""
        # NCCL does, which knows where ranks are: a rank reduces the slice of its number, wherever it is.

    def connect(
        self, arenas: Collection[Tensor], coded: Sequence[FusionBuffer] = (), *, exchanges_numbers: bool = False
    ) -> None:
        """Take the first arenas, and make now what the first legs would make. All ranks must call it.

        Args:
            arenas: the arenas.
            coded: buffers as large as all that is going to be coded at a time; their values do not count.
            exchanges_numbers: whether :meth:`exchange_numbers` is going to be called.
        """
        self.use_arenas(arenas)

    def use_arenas(self, arenas: Collection[Tensor]) -> None:
        """Take the arenas of all later legs, and free memory kept for legs of other sizes. No leg may be under way.

        An arena may be dropped while its last leg is still under way.
        """
        if self.streams is not None:
            for arena in arenas:
                self.streams.keep_until_done(arena)

    def set_pace(self, s_per_byte: float) -> None:
        """Set how many seconds the link takes to send a byte, from which a link with a pace tells when it runs idle."""
        if self.pace is not None:
            self.pace.measure(s_per_byte)

    def beside_legs(self) -> contextlib.AbstractContextManager[None]:
        """Context in which state that legs read and write may be used, on CUDA on their stream, while none does."""
        return contextlib.nullcontext()

    # The end.

    def shut_down(self) -> None:
        """End what runs on this rank. At any time, without the other ranks: garbage collection, the end of the program.

        The process groups stay, since to destroy one is a collective on NCCL; the next attach on all ranks does it.
        """
        self.is_closed = True
        # The last reference to a group closes its sockets, and the link may stay in a cycle of references.
        self.owned_groups.give_up(self._waits_for_use())
        vars(self).pop("process_group", None)

    def _waits_for_use(self) -> Callable[[], None] | None:
        """A function that waits for legs under way, and does not refer to the link; None if none can be."""
        return None

    def close(self) -> None:
        """End the link, after the legs under way have ended, and destroy its process groups. All ranks must call it."""
        try:
            self.shut_down()
        finally:
            self.owned_groups.destroy()
