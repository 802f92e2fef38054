"""Tensor fusion: which gradient elements travel together, and in which order. ``plan.cutting`` makes plans.

Pure values. This file knows nothing of processes, streams or tensors' contents.

A plan lays out all gradients of one dtype and device in one flat *arena*, in arrival order. A fusion group is a
contiguous range of its arena.

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ddp_crossover.log import short

MB = 2**20
# repr() shows this many groups at each end of a plan, and str() all of them.
_GROUPS_SHOWN = 2


class Schedule(enum.StrEnum):
    """When the legs of fusion groups are sent."""

    AUTO = "auto"
    """Scatter legs in backward; gather legs whenever the link would be idle, in backward and in the next forward."""
    DEAR = "dear"
    """As in the paper: all scatter legs in backward, then all gather legs in use order, in the next forward."""
    ALLREDUCE = "allreduce"
    """Both legs in backward, as plain DDP does; nothing is deferred."""


@dataclass(frozen=True)
class GradientSpec:
    """One gradient, as the planner sees it.

    Attributes:
        name: full parameter name, for messages.
        numel: number of elements, may be zero.
        itemsize_bytes: bytes per element on the wire, in the larger one of its two legs.
        arena: name of the arena that holds it; gradients of different dtype or device never share one.
        is_whole: whether it is never cut.
        is_coded: whether legs carry codes of it.
        align_numel: it begins at a multiple of this many elements, and shards of its arena are multiples of it.
        scatter_part, gather_part: the part of ``itemsize_bytes`` that each leg sends.
    """

    name: str
    numel: int
    itemsize_bytes: float
    arena: str
    is_whole: bool = False
    is_coded: bool = False
    align_numel: int = 1
    scatter_part: float = 1.0
    gather_part: float = 1.0

    @property
    def wire_bytes(self) -> float:
        return self.numel * self.itemsize_bytes


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, start + numel)`` of gradient ``parameter``, in the parameter's memory order."""

    parameter: int
    start: int
    numel: int


@dataclass(frozen=True)
class FusionGroup:
    """One reduce-scatter and one all-gather, or one all-reduce.

    Attributes:
        index: position in arrival order; identifies the group on the wire and in messages.
        arena: name of the arena that contains the group.
        offset: first element in the arena.
        numel: elements including padding, a multiple of the world size.
        padding: elements that belong to no gradient: fewer than the world size, at the end, unless shards or gradients
            are aligned.
        pieces: the gradients, or parts of them, that the group carries, in arena order.
        split: True if it travels as a scatter leg and a gather leg, False if as one plain all-reduce.
    """

    index: int
    arena: str
    offset: int
    numel: int
    padding: int
    pieces: tuple[Piece, ...]
    split: bool = True


@dataclass(frozen=True, repr=False)
class FusionPlan:
    """The fusion groups of one model, in arrival order, and how to send them.

    ``print(plan)`` shows every group: its size, its place in the order of the gather legs, and its parameters by name.
    ``repr(plan)`` shows the first and the last groups.

    Attributes:
        gradients: one entry per parameter, in the numbering of ``pieces`` and ``offsets``.
        world_size: ranks that share each group.
        fusion_mb: target size of a group on the wire, in MiB.
        groups: all fusion groups, in arrival order.
        use_order: group indices in the order in which the next forward needs them.
        offsets: first element of each parameter in its arena.
        arena_numel: elements of each arena, padding included.
        schedule: when the legs are sent. With ``ALLREDUCE`` the gradients travel in DDP's buckets, not in the groups.
        launch_order: (kind, group) of every leg of one iteration, for links that need one order on all ranks. Kinds
            are ``"scatter"``, ``"gather"`` and, for a group that is not split, ``"all_reduce"``. Empty if the plan
            was not simulated; the order is then that of ``Schedule.DEAR``.
    """

    gradients: tuple[GradientSpec, ...]
    world_size: int
    fusion_mb: float
    groups: tuple[FusionGroup, ...]
    use_order: tuple[int, ...]
    offsets: tuple[int, ...]
    arena_numel: dict[str, int]
    schedule: Schedule = Schedule.DEAR
    launch_order: tuple[tuple[str, int], ...] = ()

    def digest(self) -> str:
        """Return a hash that is equal on two ranks exactly if their plans are equal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def group_bytes(self, group: FusionGroup) -> int:
        """Return the bytes of a group on the wire, padding included."""
        return round(group.numel * self.gradients[group.pieces[0].parameter].itemsize_bytes)

    def places_of(self, group: FusionGroup) -> list[int]:
        """Return the first element of each of a group's pieces in the group."""
        return [self.offsets[piece.parameter] + piece.start - group.offset for piece in group.pieces]

    @property
    def is_coded(self) -> bool:
        """Whether legs carry codes of some gradients."""
        return any(gradient.is_coded for gradient in self.gradients)

    def largest_group(self) -> str:
        """Return the size of the largest group, with its unit: of a small model it is far below ``fusion_mb``."""
        return _size(max(map(self.group_bytes, self.groups)))

    def headline(self) -> str:
        """Return one line about all groups."""
        in_all = _size(sum(map(self.group_bytes, self.groups)))
        count = f"{len(self.groups)} groups" if len(self.groups) > 1 else "1 group"
        return (
            f"schedule {self.schedule}: {count} of up to {self.largest_group()}, {in_all} in all, "
            f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        )

    def __str__(self) -> str:
        return "\n".join([f"FusionPlan: {self.headline()}", *map(self._line, self.groups)])

    def __repr__(self) -> str:
        left_out = len(self.groups) - 2 * _GROUPS_SHOWN
        if left_out <= 0:
            return str(self)
        lines = [*map(self._line, self.groups)]
        lines[_GROUPS_SHOWN:-_GROUPS_SHOWN] = [f"  ... {left_out} more, which print(plan) shows"]
        return "\n".join([f"FusionPlan: {self.headline()}", *lines])

    def _line(self, group: FusionGroup) -> str:
        how = "" if group.split else ", plain all-reduce"
        return (
            f"  [{group.index}] {_size(self.group_bytes(group))}, gather position "
            f"{self.use_order.index(group.index) + 1}{how}: {self._names(group)}"
        )

    def _names(self, group: FusionGroup) -> str:
        names = [
            ("" if piece.numel == gradient.numel else "a part of ") + gradient.name
            for piece, gradient in ((piece, self.gradients[piece.parameter]) for piece in group.pieces)
        ]
        if len(names) > 2:
            return f"{names[0]} to {names[-1]} ({len(names)} gradients)"
        return ", ".join(names)


def _size(size_bytes: int) -> str:
    for unit_bytes, unit in ((MB, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit_bytes:
            return f"{short(size_bytes / unit_bytes)} {unit}"
    return f"{size_bytes} B"


def gathers_behind_scatters(plan: FusionPlan) -> dict[int, list[int]]:
    """Map each group but the last to the groups whose gather legs are launched right after its scatter leg."""
    behind: dict[int, list[int]] = {}
    last = -1
    for kind, group in plan.launch_order:
        if kind == "gather":
            behind.setdefault(last, []).append(group)
        else:
            last = group
    # After the last scatter leg, the end of backward launches the remaining gather legs in use order.
    behind.pop(last, None)
    return behind


def order_of_use(groups: Sequence[FusionGroup], use_rank: Sequence[int]) -> tuple[int, ...]:
    """Return the group indices in the order in which forward needs them.

    Args:
        groups: all fusion groups.
        use_rank: per parameter, when the forward first uses it (smaller is earlier).
    """
    first_use = {group.index: min(use_rank[piece.parameter] for piece in group.pieces) for group in groups}
    # Of groups that are needed at the same time, the last to arrive comes first, because it is nearer to the front
    # of the network.
    return tuple(sorted(first_use, key=lambda index: (first_use[index], -index)))
