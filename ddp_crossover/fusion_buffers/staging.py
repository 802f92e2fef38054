"""Plans the copies of a DDP bucket's gradients into the fusion buffers, merging copies of adjacent gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.parameters.slots import GroupInFlight, Slot


class Staging(NamedTuple):
    """How one DDP bucket is copied into the fusion buffers.

    Attributes:
        parameters: the bucket's parameters.
        copies: range of bucket elements [low, high), and the flat part of an arena that it is copied to.
        slots: the slots of its parameters.
        arrivals: fusion groups with pieces in this bucket, each with the number of those pieces.
    """

    parameters: list[Tensor]
    copies: list[tuple[int, int, Tensor]]
    slots: list[Slot]
    arrivals: list[tuple[GroupInFlight, int]]


def plan_staging(
    buffer: Tensor,
    slots: list[Slot],
    parameters: list[Tensor],
    gradients: list[Tensor],
    arenas: Mapping[str, Tensor],
) -> Staging:
    """Plan the copies of one bucket.

    Args:
        buffer: the bucket's flat gradients.
        slots: the slots of its parameters, in the order of ``parameters``.
        parameters: its parameters.
        gradients: its gradients as views of ``buffer``, in the same order.
        arenas: the memory of all fusion buffers.
    """
    copies: list[tuple[int, int, Tensor]] = []
    low = high = target = -1
    arena: Tensor | None = None
    for slot, gradient in zip(slots, gradients, strict=True):
        here = int(gradient.storage_offset()) - int(buffer.storage_offset())
        there = int(slot.view.storage_offset())
        own_arena = arenas[slot.groups[0].spec.arena]
        # Gradients that are adjacent both in the bucket and in the arena are copied together.
        if own_arena is arena and here == high and there == target + (high - low):
            high += gradient.numel()
        else:
            if arena is not None:
                copies.append((low, high, arena[target : target + high - low]))
            low, high, target, arena = here, here + gradient.numel(), there, own_arena
    if arena is not None:
        copies.append((low, high, arena[target : target + high - low]))
    counts: dict[GroupInFlight, int] = {}
    for slot in slots:
        for group in slot.groups:
            counts[group] = counts.get(group, 0) + 1
    arrivals = sorted(counts.items(), key=lambda item: item[0].spec.index)
    return Staging(parameters, copies, slots, arrivals)


def gradient_stride(parameter: Tensor) -> tuple[int, ...]:
    """Stride of ``parameter.grad``: the parameter's if it is dense, else contiguous (DDP's ``Bucket.bucket_views_in``).

    ``GradBucket.gradients()`` cannot be used for this: it shows every gradient as if it were contiguous.
    """
    numel = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != numel:
            return torch.empty(parameter.shape, device="meta").stride()
        numel *= size
    return parameter.stride()


def same_objects(left: Sequence[object], right: Sequence[object]) -> bool:
    """Whether two sequences hold identical objects in the same order."""
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
