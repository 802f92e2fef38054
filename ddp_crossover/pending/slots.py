"""State of each parameter and each fusion group during an iteration.

For the terms see [Note: DeAR's terms] in ``dear.py``.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.leg import Leg, ScatterLeg
from ddp_crossover.fusion import FusionGroup
from ddp_crossover.pending.lazy_params import LazyParam
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
        self.neighbours: list[GroupInFlight] = []
        self.view: Tensor
        self.is_cast = wire_dtype is not parameter.dtype
        self.groups: list[GroupInFlight] = []
        self.pending = PendingGradPool(parameter.shape, stride, parameter.dtype, parameter.device, lock)
        self.scales: tuple[Tensor, ...] = ()
        self.is_kept = self.is_shared = False
        self.version_before = -1

    def note_address(self, address: int) -> None:
        """Note where in a bucket DDP has put the gradient."""
        self.address = address

    def put(self, place: Place, view: Tensor, neighbours: list[GroupInFlight]) -> None:
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
    def groups_to_await(self) -> list[GroupInFlight]:
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


class GroupInFlight:
    """A fusion group in the current iteration.

    Attributes:
        spec: what it carries, from the plan.
        buffer: its fusion buffer; None while it has to be made, see ``pipeline.arenas``.
        places: for each of its pieces, the index of its part of the buffer, and its first element there; None for a
            piece that is not in the buffer.
        slots: its parameters.
        state: how far it has come.
        missing: number of its gradients, or parts of them, that have not arrived.
        scatter: its scatter leg, from ``SCATTERING`` on.
        gather: its gather leg, from ``GATHERING`` on; the same object if both legs are one all-reduce.
        put_aside: this rank's slices of the reduced gradients, if its gather leg carries something else.
    """

    def __init__(self, spec: FusionGroup, slots: list[Slot]) -> None:
        self.spec = spec
        self.slots = slots
        self.buffer: FusionBuffer | None = None
        self.places: Sequence[tuple[int, int] | None] = ()
        self.reset()
        self.state = GroupState.UNUSED

    def reset(self) -> None:
        """Begin the next iteration."""
        self.state = GroupState.FILLING
        self.missing = len(self.spec.pieces)
        self.forget_legs()

    # Where it travels from.

    def lay_out(self, buffer: FusionBuffer, places: Sequence[tuple[int, int] | None]) -> None:
        """Travel from this buffer, with the pieces at these places in it."""
        self.buffer = buffer
        self.places = places

    def forget_buffer(self) -> None:
        """Have the buffer made anew before the group travels again."""
        self.buffer = None

    def forget_legs(self) -> None:
        """Drop the legs, which hold DDP's buckets."""
        self.scatter: ScatterLeg | None = None
        self.gather: Leg | None = None
        self.put_aside: list[Tensor] = []

    # Transitions, see `GroupState`.

    def announce(self) -> None:
        """Peers may send from now on."""
        self.state = GroupState.ANNOUNCED

    def arrive(self, pieces: int) -> bool:
        """Note that so many pieces are staged; returns whether none is missing."""
        self.missing -= pieces
        return not self.missing

    def skip(self) -> None:
        """Send nothing: no rank has used its parameters."""
        self.state = GroupState.UNUSED

    def reduce_by(self, leg: ScatterLeg) -> None:
        """One leg does both."""
        self.scatter = self.gather = leg
        self.state = GroupState.GATHERING

    def scatter_by(self, leg: ScatterLeg) -> None:
        self.scatter = leg
        self.state = GroupState.SCATTERING

    def gather_by(self, leg: Leg) -> None:
        self.gather = leg
        self.state = GroupState.GATHERING

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

    def close_by(self, leg: Leg) -> None:
        """A gather leg was started that carries nothing, and changes nothing."""
        self.gather = leg

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
