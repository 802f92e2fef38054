"""The memory of fusion buffers: parts of DDP's own buckets, or arenas, into which gradients are copied.

From parts of buckets gradients travel without a copy. Arenas are allocated for any plan at attach, before activations
and optimizer state take memory: the first plan is made during a backward, when the device's memory is fullest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddp_crossover.comm.fusion_buffer import FusionBuffer, Travel
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.sums import RankWeights
from ddp_crossover.comm.wire import Wire
from ddp_crossover.fusion import GradientSpec
from ddp_crossover.pending.slots import Group, Place
from ddp_crossover.plan.cutting import arena_capacity


def travels_in_place(dtype: torch.dtype, link: Link, wire: Wire) -> bool:
    """Whether gradients of ``dtype`` travel from DDP's buckets; else copies of them do.

    With codes none does: gradients that are coded and others are in the same buckets.
    """
    return link.takes_parts and not wire.has_codes and wire.travels_as(dtype) is dtype


def alias_of(bucket: Tensor) -> Tensor:
    """A flat tensor over the memory of a bucket, with a storage of its own, for legs.

    Views of it that legs hold on other threads do not count as references to the bucket, which ``KeptGradients``
    counts; the alias keeps the object ``bucket``, which counts as one. It must not be used any more when a script moves
    the bucket's storage, as ``share_memory_()`` does, so no script gets to a bucket in which a leg is under way.
    """
    return torch.from_dlpack(bucket)


def lay_out(group: Group, weights: RankWeights, owners: Mapping[int, int]) -> None:
    """Make the fusion buffer of a group of the places of its gradients, with as few parts as possible.

    Gradients that have no place yet, because DDP leaves out their bucket, are left out.

    Args:
        group: the group.
        weights: what each rank's gradients are multiplied by.
        owners: the ranks that reduce whole gradients, by parameter; either all of the group's have one, or none.
    """
    pieces = {
        index: place._replace(low=place.low + piece.start, high=place.low + piece.start + piece.numel)
        for index, (piece, slot) in enumerate(zip(group.spec.pieces, group.slots, strict=True))
        if (place := slot.place) is not None
    }
    parts: list[Place] = []
    places: list[tuple[int, int] | None] = [None] * len(group.slots)
    owner_of_parts: list[int | None] = []
    for index, piece in sorted(pieces.items(), key=lambda item: (item[1].bucket, item[1].low)):
        owner = owners.get(group.slots[index].index)
        is_next = parts and parts[-1].bucket == piece.bucket and parts[-1].high == piece.low
        if is_next and owner_of_parts[-1] == owner:
            parts[-1] = parts[-1]._replace(high=piece.high)
        else:
            parts.append(piece)
            owner_of_parts.append(owner)
        places[index] = (len(parts) - 1, piece.low - parts[-1].low)
    owned_by = tuple(owner for owner in owner_of_parts if owner is not None)
    memories = tuple(one.memory[one.low : one.high] for one in parts)
    group.lay_out(FusionBuffer(memories, weights, owned_by or None), places)


_SPARE_NUMEL = 2**14


def make_arenas(
    specs: Sequence[GradientSpec],
    parameters: Sequence[torch.nn.Parameter],
    link: Link,
    wire: Wire,
    *,
    lands: bool,
) -> dict[str, Tensor]:
    """Allocate arenas that are large enough for every plan; uninitialized, so on CPU they take no memory until used.

    Args:
        specs: the gradients.
        parameters: their parameters, in the same order, on one device.
        link: the link that will carry the gradients.
        wire: what gradients are on the wire.
        lands: whether gather legs bring parameters, which need arenas of their own where gradients travel in another
            dtype.

    Returns:
        A flat tensor for each arena that is needed, in its wire dtype; for each :func:`landing_of`, in the parameters'.
    """
    numel = arena_capacity(specs, link.world_size, link.shard_align_bytes)
    needed, device = dtypes_of_arenas(specs, parameters, link, wire), parameters[0].device
    if lands:
        dtypes = {spec.arena: parameter.dtype for spec, parameter in zip(specs, parameters, strict=True)}
        needed |= {landing_of(arena): dtypes[arena] for arena, dtype in needed.items() if dtypes[arena] is not dtype}
        numel |= {landing_of(arena): size for arena, size in numel.items()}
    return {arena: link.allocate(numel[arena], dtype, device) for arena, dtype in needed.items()}


def landing_of(arena: str) -> str:
    """The name of the arena in which updated parameters arrive whose gradients travel in ``arena``."""
    return f"{arena}, landing"


def dtypes_of_arenas(
    specs: Sequence[GradientSpec], parameters: Sequence[torch.nn.Parameter], link: Link, wire: Wire
) -> dict[str, torch.dtype]:
    """The wire dtypes of the arenas that are needed, because their gradients do not travel in place; see above."""
    like = {spec.arena: (spec, parameter) for spec, parameter in zip(specs, parameters, strict=True)}
    return {
        arena: wire.travels_as(parameter.dtype, is_coded=spec.is_coded)
        for arena, (spec, parameter) in like.items()
        if not travels_in_place(parameter.dtype, link, wire)
    }


def lay_out_in_arena(
    group: Group,
    arena: Tensor,
    starts: Sequence[int],
    owners: Mapping[int, int],
    travel: Travel | None,
) -> None:
    """Make the fusion buffer of a group whose gradients are copied to an arena.

    Args:
        group: the group.
        arena: the arena.
        starts: where its pieces begin in its range of the arena.
        owners: the ranks that reduce whole gradients, by parameter; either all of the group's have one, or none.
        travel: how its slices travel; None: as they are.
    """
    spec = group.spec
    memory = arena.narrow(0, spec.offset, spec.numel)
    owned_by = tuple(owners[slot.index] for slot in group.slots if slot.index in owners)
    if not owned_by:
        group.lay_out(FusionBuffer((memory,), travel=travel), [(0, start) for start in starts])
        return
    parts = tuple(memory[start : start + piece.numel] for start, piece in zip(starts, spec.pieces, strict=True))
    group.lay_out(FusionBuffer(parts, owners=owned_by), [(part, 0) for part in range(len(parts))])


def whole_of(arena: Tensor) -> Tensor:
    """All the memory that :func:`zeros` was given for an arena."""
    return arena._base if arena._base is not None else arena


def zeros(numel: int, dtype: torch.dtype, device: torch.device, memory: Tensor | None) -> Tensor:
    """Return ``numel`` flat zeros, in ``memory`` if that is large enough."""
    if memory is not None and memory.numel() >= numel:
        return memory[:numel].zero_()
    # Plans differ in their padding: the spare elements let the next plan's arena fit in the same memory.
    return torch.zeros(numel + _SPARE_NUMEL, dtype=dtype, device=device)[:numel]
