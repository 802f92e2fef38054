"""Legs: one reduce-scatter or one all-gather of a fusion buffer, and what a link must offer to run them.

A :class:`Link` runs legs on a process group of its own. ``gloo_link`` does it by peer exchange from threads,
``nccl_link`` on a CUDA stream. Neither knows of DDP, parameters or optimizers.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.collectives.socket_backlog import SocketBacklog, connected_tcp_sockets
from ddp_crossover.tracing.clock import CommClock

MAX_GROUPS = 2**16 - 1


class Meanwhile(Protocol):
    """What is done with the time of a wait."""

    def __call__(self) -> float:
        """The host waits: says after how many seconds to call again."""

    def is_worth_blocking(self) -> bool:
        """Whether the host should wait although the leg does not need it to."""


class LegError(RuntimeError):
    """A leg failed on this rank: names the rank, the leg and the fusion group."""


class Leg(ABC):
    """One leg under way.

    Attributes:
        label: what it is in messages, such as ``gather leg of fusion group 3``.
    """

    label: str

    @abstractmethod
    def wait(self, meanwhile: Meanwhile | None = None) -> None:
        """After this, the caller's work sees the result, and after a gather leg may write into the buffer.

        Args:
            meanwhile: called while the host waits.

        Raises:
            LegError: if the leg failed, or one before it did.
        """

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once; False where only the device knows."""
        return False


class ScatterLeg(Leg):
    """A reduce-scatter under way."""

    @abstractmethod
    def shard(self) -> Tensor:
        """This rank's slice of the buffer; holds the sum over ranks after :meth:`wait`."""


class StreamOrder:
    """Orders the CUDA streams that a forward may run on: who reads waits for what another stream has written.

    An update is applied once, at the first wait point that needs it, on the stream that is current there. A module on
    another stream, which uses the same parameters or others of the same fusion group, finds nothing left to do.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stream: torch.cuda.Stream | None = None
        self._written: torch.cuda.Event | None = None

    def join(self) -> None:
        """Before reading or writing what :meth:`mark` was called for. Costs nothing on CPU."""
        if self._stream is None or self._written is None:
            return
        stream = self._link.current_stream()
        if stream is not None and stream != self._stream:
            stream.wait_event(self._written)

    def mark(self) -> None:
        """After reading or writing. Whoever calls it has joined before, so one event stands for all streams."""
        self._stream = self._link.current_stream()
        if self._stream is not None:
            self._written = self._written or torch.cuda.Event()
            self._written.record(self._stream)

    def keep(self, tensor: Tensor) -> None:
        """The stream that is current reads ``tensor``, which may have been made on another and be dropped soon."""
        if (stream := self._link.current_stream()) is not None:
            tensor.record_stream(stream)


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

    def is_this_thread(self) -> bool:
        """Whether the caller runs on a thread of this link."""
        return False

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


def slice_bounds(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Elements of a flat buffer that ``rank`` reduces. Even when ``numel`` divides by ``world_size``."""
    return numel * rank // world_size, numel * (rank + 1) // world_size


def all_reduce_sum(
    buffer: Tensor,
    process_group: dist.ProcessGroup,
    clock: CommClock | None = None,
    group: int = -1,
    stream: torch.cuda.Stream | None = None,
) -> torch.futures.Future[Tensor]:
    """The backend's own all-reduce, in place; the future delivers ``buffer``. ``clock`` is told of it as ``group``.

    On NCCL it needs a ``stream`` to run on, see :func:`stream_for_all_reduces`.
    """
    if stream is not None:
        return _all_reduce_sum_on(stream, buffer, process_group, clock, group)
    ended = clock.all_reduce_started(group, buffer.device) if clock is not None else None
    work = dist.all_reduce(buffer, group=process_group, async_op=True)
    assert work is not None

    def deliver(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        # On CUDA this runs on a stream that waits for the work.
        if ended is not None:
            ended()
        return future.value()[0]

    return work.get_future().then(deliver)


def _all_reduce_sum_on(
    stream: torch.cuda.Stream,
    buffer: Tensor,
    process_group: dist.ProcessGroup,
    clock: CommClock | None,
    group: int,
) -> torch.futures.Future[Tensor]:
    """All-reduce on ``stream``. The caller's stream goes on; waiting for the future makes a stream wait for the sum.

    An asynchronous call has a future as well, but torch 2.15's NCCL backend (nccl2) makes the caller's stream wait for
    the sum when it is asked for that one: backward would stand still at every bucket.
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
    # Protects the gradients, which are written on the caller's stream.
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    begin = clock.mark(stream) if clock is not None else None
    with torch.cuda.stream(stream):
        dist.all_reduce(buffer, group=process_group)
        # The future notes here how far this stream has come.
        future.set_result(buffer)
    if clock is not None:
        clock.span("all_reduce", begin, stream, group=group)
    # Protects it from an allocator that knows of the caller's stream only.
    buffer.record_stream(stream)
    return future


def stream_for_all_reduces(process_group: dist.ProcessGroup, device: torch.device) -> torch.cuda.Stream | None:
    """A stream for :func:`all_reduce_sum`; None where the backend makes futures that hold nobody up."""
    is_nccl = device.type == "cuda" and _backend_for(process_group, device).startswith("nccl")
    return torch.cuda.Stream(device) if is_nccl else None


def wait_for_futures(futures: Sequence[torch.futures.Future[Tensor]], meanwhile: Meanwhile) -> None:
    """Wait on the host until all have a result or an error, which is left in them."""
    done = threading.Event()
    torch.futures.collect_all(list(futures)).add_done_callback(lambda _: done.set())
    if not done.is_set():
        while not done.wait(meanwhile()):
            pass


def make_link(
    process_group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta,
    own_group: dist.ProcessGroup | None = None,
    *,
    sums_in_fp32: bool = False,
) -> Link:
    """The link for a device type and backend, on a process group of its own over the same ranks.

    Args:
        process_group: whose ranks and backend to use.
        device: where the gradients are.
        timeout: after which a leg fails.
        own_group: the group of its own; a new one by default.
        sums_in_fp32: see :class:`Link`.

    Raises:
        ValueError: if the backend is neither gloo nor NCCL, or ``own_group`` has other ranks.
    """
    # Imported here because both modules build on this one.
    from ddp_crossover.collectives.gloo_link import GlooLink
    from ddp_crossover.collectives.nccl_link import NcclLink
    from ddp_crossover.collectives.staged_gloo_link import StagedGlooLink

    backend = _backend_for(process_group, device)
    links = {("gloo", "cpu"): GlooLink, ("gloo", "cuda"): StagedGlooLink, ("nccl", "cuda"): NcclLink}
    link = links.get((backend, device.type))
    if link is None:
        raise ValueError(
            f"dear_hook runs on gloo (CPU or CUDA parameters) and NCCL (CUDA parameters), but the process group "
            f"uses {backend!r} for parameters on {device}; call init_process_group with one of these backends"
        )
    ranks = dist.get_process_group_ranks(process_group)
    if own_group is not None and (others := dist.get_process_group_ranks(own_group)) != ranks:
        raise ValueError(
            f"process_group has the ranks {others}, but the model is replicated over {ranks}: "
            "make it over the same ranks, or leave it out"
        )

    def new_group(purpose: str) -> dist.ProcessGroup:
        group = dist.new_group(
            ranks=ranks,
            timeout=timeout,
            backend=backend,
            # Ranks outside of it know nothing of a subgroup's model, and do not call this.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
            group_desc=f"ddp_crossover {purpose}",
        )
        return cast(dist.ProcessGroup, group)  # a member: every rank of it calls this

    before = connected_tcp_sockets()
    process_group = own_group if own_group is not None else new_group("legs")
    if link is NcclLink:
        made: Link = NcclLink(process_group, device, small_group=new_group("norms"))
    else:
        # Which sockets a given group has is not known: then gather legs leave as soon as they are ready.
        made = link(process_group, device, SocketBacklog(connected_tcp_sockets() - before))
    made.owns_process_group = own_group is None
    made.sums_in_fp32 = sums_in_fp32
    return made


def _backend_for(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """``cpu:gloo,cuda:nccl`` has one backend per device type; ``gloo`` has one for all."""
    config = dist.get_backend_config(process_group)
    by_device = dict(entry.split(":", 1) for entry in str(config).split(",") if entry.count(":") == 1)
    return by_device.get(device.type, dist.get_backend(process_group))
