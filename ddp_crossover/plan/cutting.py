"""Cuts and merges gradients into fusion groups. ``search`` chooses the sizes.

Pure functions from sizes and orders to a :class:`FusionPlan`, so the same input gives the same plan on every rank.

Groups are cut between parameters if possible. A parameter larger than a group is cut where all ranks' shards are equal
(and aligned, on a link that wants it), so only the end of a group that ends with a parameter needs padding, and a
parameter's own elements always stay contiguous.

With a :class:`Taper`, groups are small at both ends of an arena. The first group to arrive lets the link start early.
The last group to arrive is the first that the forward needs, so no compute hides its two legs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ddp_crossover.fusion import MB, FusionGroup, FusionPlan, GradientSpec, Piece, order_of_use

# Gradients that are coded lie in fusion buffers in fp32.
_CODED_BYTES = 4


class Taper(NamedTuple):
    """How group sizes rise from both ends of an arena.

    Attributes:
        slope: no group is larger than this many times its distance to the nearer end,
        smallest: but may always have this part of ``fusion_mb``.
    """

    slope: float
    smallest: float


def plan_fusion(
    specs: Sequence[GradientSpec],
    arrival_order: Sequence[int],
    use_rank: Sequence[int],
    *,
    world_size: int,
    fusion_mb: float = 8.0,
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


def _in_arrival_order(groups: list[FusionGroup], arrival: Sequence[int]) -> list[FusionGroup]:
    """Number the groups of all arenas in the order in which their last gradients arrive."""
    when = {parameter: place for place, parameter in enumerate(arrival)}
    # Groups that end with parts of one gradient stay as they were cut: sorting is stable.
    ordered = sorted(groups, key=lambda group: max(when[p.parameter] for p in group.pieces))
    return [replace(group, index=index) for index, group in enumerate(ordered)]
