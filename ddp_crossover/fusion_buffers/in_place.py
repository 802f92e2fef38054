"""Fusion buffers that are parts of DDP's own buckets: gradients travel from where DDP has put them, without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ddp_crossover.codecs.wire import Wire
from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.link import Link
from ddp_crossover.collectives.rank_weights import RankWeights
from ddp_crossover.parameters.slots import GroupInFlight, Place


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
    return torch.from_dlpack(bucket)  # type: ignore[attr-defined]


def lay_out(group: GroupInFlight, weights: RankWeights, owners: Mapping[int, int] = MappingProxyType({})) -> None:
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
