"""Norms and overflow checks on shards: each rank computes on its own slice, then ranks exchange the results.

After the scatter leg a shard holds the reduced gradients of 1/world_size of a fusion buffer, so clipping and loss
scaling need no gathered gradients. They result in a factor, which is applied when the gathered gradients are used.

One rank may have read gradients that are still on the wire on other ranks, as a logger on rank 0 does. So every rank
computes on its own slices, wherever their values are: on the wire, or in a ``.grad`` that was read, edited or replaced.
The result does not depend on what other ranks have read, so ranks need not agree on anything first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.collectives.leg import slice_bounds
from ddp_crossover.dear import Pipeline
from ddp_crossover.parameters.pending_gradient import PendingGrad
from ddp_crossover.parameters.slots import GroupInFlight, Slot


class Gradients(NamedTuple):
    """Gradients, by where their values are on this rank.

    Attributes:
        on_the_wire: unread gradients; their values are in the shards, not yet multiplied by ``slot.scales``.
        in_memory: all other gradients, with the tensor that ``.grad`` holds now.
    """

    on_the_wire: list[Slot]
    in_memory: dict[Slot, Tensor]


def gradients_of(pipeline: Pipeline, parameters: Iterable[Tensor]) -> Gradients | None:
    """The gradients of these parameters; None if DDP was told to ignore one of the parameters."""
    gradients = Gradients([], {})
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        slot = pipeline.slot_of.get(parameter)
        if slot is None:
            return None
        if pipeline.gradients.is_pending(slot) and slot not in pipeline.updates:
            gradients.on_the_wire.append(slot)
        else:
            # After step() the fusion buffer belongs to the update: later changes to `.grad` must not reach it.
            gradients.in_memory[slot] = grad.resolve() if isinstance(grad, PendingGrad) else grad
    return gradients


@torch.no_grad()
def total_norm(pipeline: Pipeline, gradients: Gradients, norm_type: float) -> Tensor:
    """Total norm of these gradients, with the same bits on every rank.

    Computed in fp32 (fp64 if any parameter is fp64) and combined over ranks in rank order. Every rank must call it. On
    CUDA the host does not wait.

    Args:
        pipeline: the pipeline that carries the gradients.
        gradients: the gradients.
        norm_type: p of the p-norm, greater than 0, may be ``inf``.

    Returns:
        A 0-dim tensor on the device of the gradients, fp32 or fp64.
    """
    pipeline.order.join()
    device, dtype = pipeline.slots[0].view.device, _accumulation_dtype(pipeline)
    by_factors: dict[tuple[int, ...], tuple[tuple[Tensor, ...], list[Tensor]]] = {}
    for factors, piece in _own_pieces(pipeline, gradients):
        by_factors.setdefault(tuple(map(id, factors)), (factors, []))[1].append(piece)
    parts = [torch.zeros((), dtype=dtype, device=device)]
    for factors, pieces in by_factors.values():
        norms = [norm.to(device) for norm in torch._foreach_norm(pieces, norm_type, dtype)]
        part = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        for factor in factors:
            part.mul_(factor.abs())
        parts.append(part)
    own: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type)
    with pipeline.waiting("norms"), pipeline.turns.released():
        of_ranks = pipeline.link.all_gather_small(own)
    total: Tensor = torch.linalg.vector_norm(of_ranks, norm_type)
    return total


def found_inf(pipeline: Pipeline, gradients: Gradients) -> Tensor:
    """1.0 if any gradient is NaN or infinite on any rank, else 0.0; 0-dim, fp32. Every rank must call it."""
    # The maximum norm is NaN or infinite exactly when an element is.
    return (~total_norm(pipeline, gradients, float("inf")).isfinite()).float()


@torch.no_grad()
def scale(gradients: Gradients, factor: Tensor) -> None:
    """Multiply gradients by a 0-dim ``factor``: those in memory now, those on the wire when they are complete."""
    for slot in gradients.on_the_wire:
        slot.scales = (*slot.scales, factor)
    if gradients.in_memory:
        torch._foreach_mul_(list(gradients.in_memory.values()), factor)


def _own_pieces(pipeline: Pipeline, gradients: Gradients) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """This rank's slices of these gradients as flat pieces, each with the factors still to be applied to it."""
    on_the_wire = set(gradients.on_the_wire)
    flat = {slot: _in_memory_order(slot, grad) for slot, grad in gradients.in_memory.items()}
    for group in pipeline.groups:
        low, high = slice_bounds(group.spec.numel, pipeline.link.world_size, pipeline.link.rank)
        if low == high:
            continue
        pending = [slot in on_the_wire for slot in group.slots]
        shard = _reduced_shard(pipeline, group, low, high) if any(pending) else None
        if all(pending) and len({tuple(map(id, slot.scales)) for slot in group.slots}) == 1:
            assert shard is not None
            yield group.slots[0].scales, shard  # padding is zero
            continue
        start = 0
        for piece, slot in zip(group.spec.pieces, group.slots, strict=True):
            first, last = max(start, low), min(start + piece.numel, high)
            if first < last and slot in on_the_wire:
                assert shard is not None
                yield slot.scales, shard[first - low : last - low]
            elif first < last and slot in flat:
                shift = piece.start - start
                yield (), flat[slot][first + shift : last + shift]
            start += piece.numel


def _reduced_shard(pipeline: Pipeline, group: GroupInFlight, low: int, high: int) -> Tensor:
    if group.is_complete:
        return group.buffer[low:high]
    assert group.scatter is not None
    with pipeline.waiting(f"scatter {group.spec.index}") as host_wait:
        # Protects the norm from incomplete sums.
        group.scatter.wait(host_wait)
    return group.scatter.shard()


def _in_memory_order(slot: Slot, grad: Tensor) -> Tensor:
    """The gradient as a flat tensor, with its elements in the order of the fusion buffer."""
    like = slot.view
    if grad.stride() != like.stride():
        grad = torch.empty_strided(like.shape, like.stride(), dtype=grad.dtype, device=like.device).copy_(grad)
    return grad.as_strided((grad.numel(),), (1,))


def _accumulation_dtype(pipeline: Pipeline) -> torch.dtype:
    has_fp64 = any(slot.parameter.dtype is torch.float64 for slot in pipeline.slots)
    return torch.float64 if has_fp64 else torch.float32
