"""Tensor fusion: which gradient elements travel together, and in which order. ``plan.search`` chooses the sizes.

Pure functions from sizes and orders to a :class:`FusionPlan`. This file knows nothing of processes, streams or
tensors' contents, so the same input gives the same plan on every rank.

A plan lays out all gradients of one dtype and device in one flat *arena*, in arrival order. A fusion group is a
contiguous range of its arena. Groups are cut between parameters if possible. A parameter larger than a group is cut
where all ranks' shards are equal (and aligned, on a link that wants it), so only the end of a group that ends with a
parameter needs padding, and a parameter's own elements always stay contiguous.

With a :class:`Taper`, groups are small at both ends of an arena. The first group to arrive lets the link start early.
The last group to arrive is the first that the forward needs, so no compute hides its two legs.

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from ddp_crossover.log import short

MB = 2**20
DEFAULT_FUSION_MB = 8.0
# Gradients that are coded lie in fusion buffers in fp32.
_CODED_BYTES = 4
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


class Taper(NamedTuple):
    """How group sizes rise from both ends of an arena.

    Attributes:
        slope: no group is larger than this many times its distance to the nearer end,
        smallest: but may always have this part of ``fusion_mb``.
    """

    slope: float
    smallest: float


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


def plan_fusion(
    specs: Sequence[GradientSpec],
    arrival_order: Sequence[int],
    use_rank: Sequence[int],
    *,
    world_size: int,
    fusion_mb: float = DEFAULT_FUSION_MB,
    taper: Taper | None = None,
    shard_align_bytes: int = 1,
) -> FusionPlan:
    """Cut and merge gradients into fusion groups.

    Args:
        specs: one entry per parameter.
        arrival_order: parameter indices in the order in which backward produces their gradients.
        use_rank: per parameter, when the forward first uses it (smaller is earlier).
        world_size: ranks per group; group sizes are multiples of it.
        fusion_mb: target size of a group in MiB.
        taper: make groups smaller towards both ends of each arena; None: all alike.
        shard_align_bytes: shards are multiples of this many bytes, and so begin at multiples of it in their arena.

    Returns:
        A plan in which every element of every gradient lies in exactly one group.

    Raises:
        ValueError: if ``arrival_order`` is not a permutation, ``world_size`` is below 1 or ``fusion_mb`` not above 0.
    """
    if sorted(arrival_order) != list(range(len(specs))):
        raise ValueError("arrival_order must name every parameter exactly once")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not fusion_mb > 0:
        raise ValueError(f"fusion_mb must be greater than 0 MiB, got {fusion_mb}")

    groups: list[FusionGroup] = []
    offsets = [0] * len(specs)
    arena_numel: dict[str, int] = {}
    for arena in dict.fromkeys(specs[i].arena for i in arrival_order):
        members = [i for i in arrival_order if specs[i].arena == arena]
        total_numel = sum(specs[i].numel for i in members)
        quantum = _quantum(specs[members[0]], world_size, shard_align_bytes)
        cutter = _ArenaCutter(arena, quantum, fusion_mb, taper, total_numel)
        for parameter in members:
            offsets[parameter] = cutter.add(parameter, specs[parameter])
        groups += cutter.finish()
        arena_numel[arena] = cutter.offset

    groups = _in_arrival_order(groups, arrival_order)
    return FusionPlan(
        gradients=tuple(specs),
        world_size=world_size,
        fusion_mb=fusion_mb,
        groups=tuple(groups),
        use_order=order_of_use(groups, use_rank),
        offsets=tuple(offsets),
        arena_numel=arena_numel,
    )


def arena_capacity(specs: Sequence[GradientSpec], world_size: int, shard_align_bytes: int = 1) -> dict[str, int]:
    """Return how many elements of each arena suffice for every plan, if every gradient ends a group and is padded."""
    capacity: dict[str, int] = {}
    for spec in specs:
        quantum = _quantum(spec, world_size, shard_align_bytes)
        capacity[spec.arena] = capacity.get(spec.arena, 0) + spec.numel + quantum - 1
    return capacity


def _quantum(spec: GradientSpec, world_size: int, shard_align_bytes: int) -> int:
    """Return the number of elements of which groups are multiples."""
    in_memory_bytes = _CODED_BYTES if spec.is_coded else int(spec.itemsize_bytes)
    return world_size * math.lcm(max(shard_align_bytes // in_memory_bytes, 1), spec.align_numel)


class _ArenaCutter:
    """Lays out gradients in one arena and closes a group whenever the target size is reached."""

    def __init__(self, arena: str, quantum: int, fusion_mb: float, taper: Taper | None, total_numel: int) -> None:
        self._arena = arena
        self._quantum = quantum
        self._fusion_mb = fusion_mb
        self._taper = taper
        self._total_numel = total_numel
        self._groups: list[FusionGroup] = []
        self._pieces: list[Piece] = []
        self._start = 0
        self._closed_numel = 0  # elements in closed groups, without padding at their ends
        self._padding = 0  # elements between gradients of the open group
        self.offset = 0

    def add(self, parameter: int, spec: GradientSpec) -> int:
        """Lay out one gradient; returns its first element in the arena."""
        held = self.offset - self._start
        if held and held + spec.numel > self._capacity(spec.itemsize_bytes):
            self._close()
        gap = -self.offset % spec.align_numel  # none at the start of a group
        self._padding += gap
        self.offset += gap
        first = self.offset
        start = 0
        while not spec.is_whole and (size := self._cut(spec.numel - start, spec.itemsize_bytes)):
            self._append(Piece(parameter, start, size))
            self._close()
            start += size
        self._append(Piece(parameter, start, spec.numel - start))
        return first

    def finish(self) -> list[FusionGroup]:
        if self._pieces:
            self._close()
        return self._groups

    def _capacity(self, itemsize_bytes: float) -> int:
        """Return how many elements the open group may hold."""
        target_numel = self._fusion_mb * MB / itemsize_bytes
        if self._taper is not None:
            to_nearer_end = min(self._closed_numel, self._total_numel - self._closed_numel)
            rising_numel = max(to_nearer_end * self._taper.slope, target_numel * self._taper.smallest)
            target_numel = min(rising_numel, target_numel)
        return max(int(target_numel) // self._quantum, 1) * self._quantum

    def _cut(self, numel: int, itemsize_bytes: float) -> int:
        """Return the size of the next piece of a gradient of ``numel`` elements, or 0 if it fits into a group.

        Pieces have about equal sizes, of which ranks have equal shards, so that they need no padding.
        """
        pieces = -(-numel // self._capacity(itemsize_bytes))
        if pieces <= 1:
            return 0
        even = -(-numel // pieces)
        return -(-even // self._quantum) * self._quantum

    def _append(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.offset += piece.numel

    def _close(self) -> None:
        self._closed_numel += self.offset - self._start
        padding = -(self.offset - self._start) % self._quantum
        self.offset += padding
        self._groups.append(
            FusionGroup(
                index=len(self._groups),
                arena=self._arena,
                offset=self._start,
                numel=self.offset - self._start,
                padding=self._padding + padding,
                pieces=tuple(self._pieces),
            )
        )
        self._pieces = []
        self._padding = 0
        self._start = self.offset


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


def _in_arrival_order(groups: list[FusionGroup], arrival: Sequence[int]) -> list[FusionGroup]:
    """Number the groups of all arenas in the order in which their last gradients arrive."""
    when = {parameter: place for place, parameter in enumerate(arrival)}
    # Groups that end with parts of one gradient stay as they were cut: sorting is stable.
    ordered = sorted(groups, key=lambda group: max(when[p.parameter] for p in group.pieces))
    return [replace(group, index=index) for index, group in enumerate(ordered)]


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
