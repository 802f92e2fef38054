"""State of each parameter and each fusion group during an iteration.

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.leg import Leg, ScatterLeg
from ddp_crossover.comm.link import Link
from ddp_crossover.fusion import FusionGroup
from ddp_crossover.pending.lazy_param import LazyParam
from ddp_crossover.pending.pending_gradient import PendingGradPool


class Place(NamedTuple):
    """Where elements lie: a bucket of DDP, its memory as one flat tensor, and the range ``[low, high)`` in it."""

    bucket: int
    memory: Tensor
    low: int
    high: int


class Slot:
    """The gradient of one parameter, and its place in the fusion buffers of a plan.

    Attributes:
        lazy: the parameter's value, and whether its update is pending; it outlives the plan.
        index, name, parameter: as there.
        stride: stride of its gradient.
        is_in_place: whether its gradient travels from DDP's bucket; else a copy travels from an arena.
        neighbours: the fusion groups with a part in the bucket that it is in, if it travels in place.
        address: where in a bucket DDP has put it, once it has arrived; else 0.
        place: where DDP has put it, if it travels in place and has arrived once.
        view: its gradient inside the fusion buffers, in the wire dtype; set once it has a place there.
        is_cast: whether the wire dtype differs from the parameter's dtype.
        groups: the fusion groups that carry a piece of it.
        pending: makes its ``PendingGrad``.
        scales: factors (0-dim tensors) by which the complete gradient is multiplied, in the parameter's dtype.
        is_shared: whether its ``.grad`` is a part of a fusion buffer.
        is_kept: whether a script keeps the memory of its gradient, so that it was delivered at the end of backward.
        version_before: version counter of ``.grad`` before DDP wrote to it, if it did, at the end of backward.
    """

    __slots__ = (
        "address",
        "groups",
        "index",
        "is_cast",
        "is_in_place",
        "is_kept",
        "is_shared",
        "lazy",
        "name",
        "neighbours",
        "parameter",
        "pending",
        "place",
        "scales",
        "stride",
        "version_before",
        "view",
    )

    def __init__(
        self,
        lazy: LazyParam,
        stride: tuple[int, ...],
        wire_dtype: torch.dtype,
        lock: threading.RLock,
        *,
        is_in_place: bool,
    ) -> None:
        parameter = lazy.parameter
        self.lazy = lazy
        self.index = lazy.index
        self.name = lazy.name
        self.parameter = parameter
        self.stride = stride
        self.is_in_place = is_in_place
        self.address = 0
        self.place: Place | None = None
        self.neighbours: list[Group] = []
        self.view: Tensor
        self.is_cast = wire_dtype is not parameter.dtype
        self.groups: list[Group] = []
        self.pending = PendingGradPool(parameter.shape, stride, parameter.dtype, parameter.device, lock)
        self.scales: tuple[Tensor, ...] = ()
        self.is_kept = self.is_shared = False
        self.version_before = -1

    def note_address(self, address: int) -> None:
        """Note where in a bucket DDP has put the gradient."""
        self.address = address

    def put(self, place: Place, view: Tensor, neighbours: list[Group]) -> None:
        """Note where DDP has put the gradient; its fusion buffers have to be made anew.

        Args:
            place: its place in a bucket.
            view: the same as a tensor with the gradient's shape.
            neighbours: all fusion groups with a part in the bucket.
        """
        self.place = place
        self.view = view
        self.neighbours = neighbours
        for group in self.groups:
            group.forget_buffer()

    def has_not_arrived(self) -> None:
        """Note that DDP has put it nowhere in this iteration."""
        self.place = None

    def forget_bucket(self) -> None:
        """Drop references to DDP's bucket."""
        if self.is_in_place and self.place is not None:
            self.place = None
            del self.view

    @property
    def groups_to_await(self) -> list[Group]:
        """The fusion groups that write where its gradient is: all those of the bucket, if ``.grad`` is a part of it."""
        return self.neighbours if self.is_shared else self.groups

    @property
    def is_spread(self) -> bool:
        """Whether some of what it waits for is spread over the ranks: a rank has its shard of it."""
        return any(group.is_spread for group in self.groups_to_await)

    def reset(self) -> None:
        """Begin with the gradient of another backward."""
        self.is_kept = self.is_shared = False

    def note_version(self, version: int) -> None:
        """Note the version of ``.grad`` before DDP writes to it."""
        self.version_before = version

    def note_kept(self, is_kept: bool) -> None:
        """Note whether a script keeps the memory of ``.grad``."""
        self.is_kept = is_kept

    def note_memory(self, memory: Tensor) -> None:
        """Note where ``.grad`` will be."""
        self.is_shared = self.is_in_place and memory.data_ptr() == self.view.data_ptr()

    def scale_by(self, factor: Tensor) -> None:
        """Multiply the gradient, once it is complete, by a 0-dim tensor."""
        self.scales = (*self.scales, factor)

    def forget_scales(self) -> None:
        """Multiply it by nothing more."""
        self.scales = ()


class GroupState(enum.Enum):
    """How far a fusion group has come in an iteration."""

    # The next backward brings every state back to FILLING.
    FILLING = "some of its gradients have not arrived"  # -> ANNOUNCED, or as from there
    ANNOUNCED = "peers may send their gradients already"  # -> SCATTERING: the last gradient was staged; -> UNUSED
    SCATTERING = "its scatter leg was started"  # -> GATHERING; skipped if both legs are one all-reduce
    GATHERING = "its gather leg was started"  # -> COMPLETE: code that needs what it brings has waited for it
    COMPLETE = "what its gather leg brings is there: the reduced gradients, unless these are put aside"
    UNUSED = "no rank has used its parameters, so nothing was sent"


class ShardPiece(NamedTuple):
    """A part of a parameter's gradient in a rank's shard of a fusion group.

    Attributes:
        slot: the parameter.
        start, stop: range of the gradient's elements, in memory order.
        part: index of the part of the fusion buffer whose slice it is in.
        low: its first element in that slice.
    """

    slot: Slot
    start: int
    stop: int
    part: int
    low: int

    def of(self, shards: Sequence[Tensor]) -> Tensor:
        """Its elements, flat, given the shard as the slice of each part."""
        return shards[self.part][self.low : self.low + self.stop - self.start]


class Group:
    """A fusion group in the current iteration; it drives its own legs.

    Args:
        spec: what it carries, from the plan.
        slots: its parameters.
        link: runs its legs.
        make_buffer: calls :meth:`lay_out` with a fusion buffer of the places where DDP has put its gradients; None if
            copies of them travel from an arena, where it is laid out for good.
        changes_each_time: whether that buffer is another one in each iteration, as far as is known.

    Attributes:
        spec, slots: as above.
        buffer: its fusion buffer; None while it has to be made.
        places: for each of its pieces, the index of its part of the buffer, and its first element there; None for a
            piece that is not in the buffer.
        state: how far it has come.
        missing: number of its gradients, or parts of them, that have not arrived.
        scatter: its scatter leg, from ``SCATTERING`` on.
        gather: its gather leg, from ``GATHERING`` on; the same object if both legs are one all-reduce.
        put_aside: this rank's slices of the reduced gradients, if its gather leg carries something else.
    """

    def __init__(
        self,
        spec: FusionGroup,
        slots: list[Slot],
        link: Link,
        make_buffer: Callable[[Group], None] | None,
        *,
        changes_each_time: bool,
    ) -> None:
        self.spec = spec
        self.slots = slots
        self.buffer: FusionBuffer | None = None
        self.places: Sequence[tuple[int, int] | None] = ()
        self._link = link
        self._make_buffer = make_buffer
        self._changes_each_time = changes_each_time
        self.reset()
        self.state = GroupState.UNUSED

    def reset(self) -> None:
        """Begin the next iteration."""
        self.state = GroupState.FILLING
        self.missing = len(self.spec.pieces)
        self.forget_legs()

    # Where it travels from.

    @property
    def is_copied(self) -> bool:
        """Whether copies of its gradients travel from an arena, and not the gradients from DDP's buckets."""
        return self._make_buffer is None

    def lay_out(self, buffer: FusionBuffer, places: Sequence[tuple[int, int] | None]) -> None:
        """Travel from this buffer, with the pieces at these places in it."""
        self.buffer = buffer
        self.places = places

    def forget_buffer(self) -> None:
        """Have the buffer made anew before the group travels again."""
        self.buffer = None

    def _laid_out(self) -> FusionBuffer:
        if self._make_buffer is not None and (self.buffer is None or self._changes_each_time):
            self._make_buffer(self)
        assert self.buffer is not None
        return self.buffer

    def forget_legs(self) -> None:
        """Drop the legs, which hold DDP's buckets."""
        self.scatter: ScatterLeg | None = None
        self.gather: Leg | None = None
        self.put_aside: list[Tensor] = []

    # Transitions, see `GroupState`.

    def announce(self, *, same_buckets: bool) -> None:
        """Let faster peers send from now on, if it is known from where it is going to travel.

        Args:
            same_buckets: whether DDP's buckets are where they were in the last iteration, and will stay.
        """
        is_known = self.is_copied or (same_buckets and self.buffer is not None)
        if is_known and not self.is_launched:
            self.state = GroupState.ANNOUNCED
            self._link.announce(self.spec.index, self._laid_out())

    def arrive(self, pieces: int) -> bool:
        """Note that so many pieces are staged; returns whether none is missing."""
        self.missing -= pieces
        return not self.missing

    def skip(self) -> None:
        """Send nothing: no rank has used its parameters."""
        self.state = GroupState.UNUSED

    def launch(self, landing_of: Callable[[Group], FusionBuffer | None]) -> None:
        """Start its scatter leg, or one leg that does both.

        Args:
            landing_of: where the gather leg of a group arrives that is laid out; None: in the fusion buffer.
        """
        buffer = self._laid_out()
        if self.spec.split:
            self._scatter(buffer, landing_of(self))
        else:
            self.scatter = self.gather = self._link.all_reduce_leg(self.spec.index, buffer)
            self.state = GroupState.GATHERING

    def _scatter(self, buffer: FusionBuffer, landing: FusionBuffer | None = None) -> None:
        self.scatter = self._link.reduce_scatter(self.spec.index, buffer, landing)
        self.state = GroupState.SCATTERING

    def end_announcement(self) -> None:
        """Have an announced leg carry zeros, as on all ranks, whose backward has raised: no receive must stay open."""
        if self.state is GroupState.ANNOUNCED:
            buffer = self._laid_out()
            travel = None if buffer.travel is None else buffer.travel.of_nothing()
            self._scatter(FusionBuffer(tuple(map(torch.zeros_like, buffer.parts)), travel=travel))

    def start_gather(self, urgency: int | None = None) -> None:
        """Start its gather leg behind its scatter leg, unless one was started, see :meth:`Link.all_gather`."""
        if self.state is GroupState.SCATTERING:
            assert self.scatter is not None
            self.gather = self._link.all_gather(self.scatter, urgency)
            self.state = GroupState.GATHERING

    def close(self) -> None:
        """Start a gather leg that carries nothing, and changes nothing: peers have posted their receives."""
        assert self.scatter is not None
        self.gather = self._link.all_gather(self.scatter)

    def complete(self) -> None:
        """What the gather leg brings is there."""
        self.state = GroupState.COMPLETE

    def keep(self, shards: list[Tensor]) -> None:
        """Put this rank's slices of the reduced gradients aside: the gather leg carries something else."""
        self.put_aside = shards

    def restore(self) -> None:
        """The reduced gradients were brought in another way than by the gather leg, and none is put aside."""
        self.put_aside = []
        self.state = GroupState.COMPLETE

    def shard_pieces(self, number: int, world_size: int) -> Iterator[ShardPiece]:
        """What is in the shard with this number, without padding and without what the buffer does not hold."""
        assert self.buffer is not None
        bounds = self.buffer.bounds(number, world_size)
        for piece, slot, place in zip(self.spec.pieces, self.slots, self.places, strict=True):
            if place is None:
                continue
            part, begin = place
            low, high = bounds[part]
            first, last = max(begin, low), min(begin + piece.numel, high)
            if first < last:
                shift = piece.start - begin
                yield ShardPiece(slot, first + shift, last + shift, part, first - low)

    @property
    def is_complete(self) -> bool:
        """Whether its gather leg has brought what it brings in this iteration."""
        return self.state is GroupState.COMPLETE or self.state is GroupState.UNUSED

    @property
    def is_spread(self) -> bool:
        """Whether its reduced gradients are spread over the ranks, each of which has its shard of them."""
        return self.state is GroupState.SCATTERING or bool(self.put_aside)

    @property
    def is_launched(self) -> bool:
        """Whether its scatter leg was started in this iteration."""
        return self.scatter is not None
