"""Norms and overflow checks on shards: each rank computes on its own slice, then ranks exchange the results.

After the scatter leg a shard holds the reduced gradients of 1/world_size of a fusion buffer, so clipping and loss
scaling need no gathered gradients. They result in a factor, which is applied when the gathered gradients are used.

One rank may have read gradients that are still on the wire on other ranks, as a logger on rank 0 does. So every rank
computes on its own slices, wherever their values are: on the wire, or in a ``.grad`` that was read, edited or replaced.
The result does not depend on what other ranks have read, so ranks need not agree on anything first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from ddp_crossover.dear import Pipeline
from ddp_crossover.pending.flat import flat_of, table_of
from ddp_crossover.pending.pending_gradient import resolved
from ddp_crossover.pending.slots import Group, Slot
from ddp_crossover.torch_internals.gradient_calls import require_on_device

EVERY_RANK = (
    "With norms='sharded' every rank must make the same calls of clip_grad_norm_, get_total_norm and GradScaler, in "
    "the same order: let all ranks compute the norm and rank 0 log it, or attach with norms='exact'"
)
_EXACT_IN_FP32 = 2**24


class Gradients(NamedTuple):
    """Gradients, by where their values are on this rank.

    Attributes:
        on_the_wire: unread gradients; their values are in the shards, not yet multiplied by ``slot.scales``.
        in_memory: all other gradients, with the tensor that ``.grad`` holds now.
    """

    on_the_wire: list[Slot]
    in_memory: dict[Slot, Tensor]


def shared_gradients(pipeline: Pipeline | None, parameters: Iterable[Tensor]) -> Gradients | None:
    """The gradients of these parameters; None if some are only this rank's own.

    That is so before the first pipelined backward, in ``no_sync()``, and if DDP was told to ignore a parameter.
    """
    if pipeline is None or not pipeline.has_shared_gradients:
        return None
    gradients = Gradients([], {})
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        slot = pipeline.slot_of.get(parameter)
        if slot is None:
            return None
        if pipeline.gradients.is_pending(slot) and not pipeline.updates.own_gradient_of(slot):
            gradients.on_the_wire.append(slot)
        else:
            # After step() the fusion buffer belongs to the update: later changes to `.grad` must not reach it.
            gradients.in_memory[slot] = resolved(grad)
    return gradients


def clip_grad_norm(
    pipeline: Pipeline | None, parameters: Sequence[Tensor], max_norm: float, norm_type: float
) -> Tensor:
    """Clip the norm of all gradients of a model, and return what it was; see :meth:`DearState.clip_grad_norm_`."""
    gradients = shared_gradients(pipeline, parameters)
    if pipeline is None or gradients is None or norm_type <= 0:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    norm = total_norm(pipeline, gradients, float(norm_type))
    scale(gradients, torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
    return norm if any(gradients) else norm.to(torch.get_default_dtype())  # of no gradients, as torch's function


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
    pipeline.before_exchange()
    pipeline.order.join()
    device, dtype = pipeline.device, _accumulation_dtype(pipeline)
    by_factors: dict[tuple[int, ...], tuple[tuple[Tensor, ...], list[Tensor]]] = {}
    for _, factors, piece in _own_pieces(pipeline, gradients, merge=True):
        by_factors.setdefault(tuple(map(id, factors)), (factors, []))[1].append(piece)
    parts = [torch.zeros((), dtype=dtype, device=device)]
    for factors, pieces in by_factors.values():
        norms = [norm.to(device) for norm in torch._foreach_norm(pieces, norm_type, dtype)]
        part = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        for factor in factors:
            part.mul_(factor.abs())
        parts.append(part)
    own: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type)
    with pipeline.compute_waits.of("norms"), pipeline.compute_waits.others.released():
        of_ranks = pipeline.link.all_gather_small(own)
    total: Tensor = torch.linalg.vector_norm(of_ranks, norm_type)
    return total


@torch.no_grad()
def norms(pipeline: Pipeline, gradients: Gradients, norm_type: float) -> dict[Slot, Tensor]:
    """The norm of each of these gradients, with the same bits on every rank, for one small exchange altogether.

    For the arguments see :func:`total_norm`. The norms are 0-dim tensors on the device of the gradients, fp32 or fp64.

    Raises:
        RuntimeError: if the call of another rank that this one has met is not the same (on CUDA when the device gets
            there).
    """
    pipeline.before_exchange()
    pipeline.order.join()
    device, dtype = pipeline.device, _accumulation_dtype(pipeline)
    # A group of another arena may be between those with the pieces of a gradient.
    of_slots: list[list[Tensor]] = [[] for _ in pipeline.slots]
    pieces = [(slot, piece) for slot, _, piece in _own_pieces(pipeline, gradients, merge=False)]
    if pieces:
        of_pieces = torch._foreach_norm([piece for _, piece in pieces], norm_type, dtype)
        for (slot, _), norm in zip(pieces, of_pieces, strict=True):
            of_slots[slot.index].append(norm.to(device))
    nothing = torch.zeros((), dtype=dtype, device=device)
    own = torch.linalg.vector_norm(table_of(of_slots, nothing), norm_type, dim=1)
    each = own.unbind()
    by_factors: dict[tuple[int, ...], list[Slot]] = {}
    for slot in gradients.on_the_wire:
        by_factors.setdefault(tuple(map(id, slot.scales)), []).append(slot)
    for alike in by_factors.values():
        for factor in alike[0].scales:
            torch._foreach_mul_([each[slot.index] for slot in alike], factor.abs())
    # Norms of all slots travel, whichever are asked for, so that different calls of two ranks meet and are found out.
    slots = sorted([*gradients.on_the_wire, *gradients.in_memory], key=lambda slot: slot.index)
    call = crc32(repr((pipeline.iteration, norm_type, [slot.index for slot in slots])).encode())
    call_id = torch.full((1,), call % _EXACT_IN_FP32, dtype=dtype, device=device)
    with pipeline.compute_waits.of("norms"), pipeline.compute_waits.others.released():
        of_ranks = pipeline.link.all_gather_small(torch.cat((call_id, own)))
    require_on_device((of_ranks[:, 0] == of_ranks[0, 0]).all(), f"ranks took different norms. {EVERY_RANK}")
    total = torch.linalg.vector_norm(of_ranks[:, 1:], norm_type, dim=0).unbind()
    return {slot: total[slot.index] for slot in slots}


def found_inf(pipeline: Pipeline, gradients: Gradients) -> Tensor:
    """1.0 if any gradient is NaN or infinite on any rank, else 0.0; 0-dim, fp32. Every rank must call it."""
    # The maximum norm is NaN or infinite exactly when an element is.
    return (~total_norm(pipeline, gradients, float("inf")).isfinite()).float()


@torch.no_grad()
def scale(gradients: Gradients, factor: Tensor) -> None:
    """Multiply gradients by a 0-dim ``factor``: those in memory now, those on the wire when they are complete."""
    for slot in gradients.on_the_wire:
        slot.scale_by(factor)
    if gradients.in_memory:
        torch._foreach_mul_(list(gradients.in_memory.values()), factor)


def _own_pieces(
    pipeline: Pipeline, gradients: Gradients, *, merge: bool
) -> Iterator[tuple[Slot, tuple[Tensor, ...], Tensor]]:
    """This rank's slices of these gradients as flat pieces, each with the factors still to be applied to it.

    With ``merge``, a shard may come as one piece, under the first of its slots.
    """
    on_the_wire = set(gradients.on_the_wire)
    flat = {slot: flat_of(grad, slot.stride) for slot, grad in gradients.in_memory.items()}
    for group in pipeline.groups:
        if group.buffer is None:
            continue  # no rank has used its parameters yet
        pending = [slot in on_the_wire for slot in group.slots]
        shards = _reduced_shards(pipeline, group) if any(pending) else []
        if merge and all(pending) and len({tuple(map(id, slot.scales)) for slot in group.slots}) == 1:
            for shard in shards:
                if shard.numel():
                    yield group.slots[0], group.slots[0].scales, shard  # padding is zero
            continue
        for piece in group.shard_pieces(pipeline.link.shard, pipeline.link.world_size):
            if piece.slot in on_the_wire:
                yield piece.slot, piece.slot.scales, piece.of(shards)
            elif piece.slot in flat:
                yield piece.slot, (), flat[piece.slot][piece.start : piece.stop]


def _reduced_shards(pipeline: Pipeline, group: Group) -> list[Tensor]:
    assert group.buffer is not None
    if group.put_aside:
        return group.put_aside  # the buffer may hold updated parameters
    if group.is_complete:
        return group.buffer.slices(pipeline.link.shard, pipeline.link.world_size)
    assert group.scatter is not None
    with pipeline.compute_waits.of(f"scatter {group.spec.index}") as host_wait:
        # Protects the norm from incomplete sums.
        group.scatter.wait(host_wait)
    return group.scatter.shards()


def _accumulation_dtype(pipeline: Pipeline) -> torch.dtype:
    has_fp64 = any(slot.parameter.dtype is torch.float64 for slot in pipeline.slots)
    return torch.float64 if has_fp64 else torch.float32
