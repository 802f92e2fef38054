"""Norms and overflow checks on shards: each rank looks at its own slice, then all agree.

After the scatter leg a shard holds the reduced gradients of 1/world_size of a fusion buffer, so clipping and loss
scaling need no gathered gradient. What they find is a factor, applied when the gathered gradients are used.

A rank on which somebody has edited a gradient cannot answer for its shard. All ranks must then take the other way,
so each exchange carries whether its rank could answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ddp_crossover.collectives import slice_bounds
from ddp_crossover.dear import Pipeline
from ddp_crossover.slots import GroupInFlight, Slot


def total_norm(pipeline: Pipeline, slots: list[Slot] | None, norm_type: float) -> Tensor | None:
    """Norm over all of these gradients, the same bits on every rank.

    Computed in fp32 (fp64 if any gradient is fp64), summed over ranks in rank order. Every rank must call it.

    Args:
        pipeline: whose gradients.
        slots: the gradients, or None if this rank cannot answer.
        norm_type: p of the p-norm, may be ``inf``.

    Returns:
        A 0-dim tensor; None if some rank could not answer.
    """
    device, dtype = _device_of(pipeline), _accumulation_dtype(pipeline)
    own = torch.zeros((), dtype=dtype, device=device)
    if slots:
        norms = [
            torch.linalg.vector_norm(piece, norm_type, dtype=dtype).to(device)
            for piece in _shard_pieces(pipeline, slots)
        ]
        if norms:
            own = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        for factor in slots[0].scales:
            own = own * factor.abs()
    norms_by_rank = _exchange(pipeline, own, answered=slots is not None)
    return None if norms_by_rank is None else torch.linalg.vector_norm(norms_by_rank, norm_type)


def found_inf(pipeline: Pipeline, slots: list[Slot] | None) -> Tensor | None:
    """Whether any of these gradients is NaN or infinite on any rank. Every rank must call it.

    Returns:
        A 0-dim fp32 tensor, 1.0 or 0.0; None if some rank could not answer.
    """
    own = torch.zeros((), device=_device_of(pipeline))
    for piece in _shard_pieces(pipeline, slots or []):
        own = torch.maximum(own, (~torch.isfinite(piece)).any().to(own))
    found_by_rank = _exchange(pipeline, own, answered=slots is not None)
    return None if found_by_rank is None else found_by_rank.amax(0)


def scale_later(slots: list[Slot], factor: Tensor) -> None:
    """Multiply these gradients by a 0-dim ``factor`` once they are complete."""
    for slot in slots:
        slot.scales = (*slot.scales, factor)


def _exchange(pipeline: Pipeline, own: Tensor, *, answered: bool) -> Tensor | None:
    rows = pipeline.link.all_gather_small(torch.stack([own, torch.full_like(own, answered)]))
    return rows[:, 0] if bool(rows[:, 1].all()) else None


def _shard_pieces(pipeline: Pipeline, slots: list[Slot]) -> Iterator[Tensor]:
    """This rank's reduced elements of these gradients, after their scatter legs."""
    wanted = set(slots)
    for group in pipeline.groups:
        members = [slot in wanted for slot in group.slots]
        if group.scatter is None or not any(members):
            continue
        # Protects the norm from sums that are not complete.
        group.scatter.wait()
        shard = group.scatter.shard()
        if all(members):
            yield shard  # padding is zero
        else:
            yield from _overlaps(pipeline, group, shard, members)


def _overlaps(pipeline: Pipeline, group: GroupInFlight, shard: Tensor, members: list[bool]) -> Iterator[Tensor]:
    low, high = slice_bounds(group.spec.numel, pipeline.link.world_size, pipeline.link.rank)
    start = 0
    for piece, wanted in zip(group.spec.pieces, members, strict=True):
        end = start + piece.numel
        if wanted and max(start, low) < min(end, high):
            yield shard[max(start, low) - low : min(end, high) - low]
        start = end


def _device_of(pipeline: Pipeline) -> torch.device:
    return pipeline.slots[0].view.device


def _accumulation_dtype(pipeline: Pipeline) -> torch.dtype:
    has_fp64 = any(slot.view.dtype is torch.float64 for slot in pipeline.slots)
    return torch.float64 if has_fp64 else torch.float32
