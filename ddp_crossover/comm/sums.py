"""What gradients are multiplied by, cast to and added up in: in rank order, so that runs are the same bit for bit."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

# 512 KiB of fp32: fp32 intermediates of casts from or to 16 bits stay in a core's cache.
CHUNK_NUMEL = 2**17


def scale_into(target: Tensor, source: Tensor, factor: float) -> None:
    """Set ``target`` to ``source * factor``, computed in the dtype of ``source``, rounded once; both are flat.

    With a factor of 0 ``target`` is 0, whatever is in ``source``: it may be the loss of no sample, which is NaN.
    """
    if factor == 0.0:
        target.zero_()
        return
    if target.dtype is source.dtype or not source.is_cpu:
        torch.mul(source, factor, out=target)
        return
    # In chunks: on CPU torch would make the whole product in the wider dtype and cast it in a second pass.
    for product, part in zip(target.split(CHUNK_NUMEL), source.split(CHUNK_NUMEL), strict=True):
        torch.mul(part, factor, out=product)


class RankWeights:
    """Each rank's share of the global batch: equal shares, as in plain DDP, until counts of samples are set.

    Args:
        rank: this rank.
        world_size: number of ranks.

    Attributes:
        of_ranks: the weights in rank order; they add up to 1.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self.of_ranks: tuple[float, ...] = (1.0 / world_size,) * world_size

    @property
    def own(self) -> float:
        return self.of_ranks[self._rank]

    def set_counts(self, counts: Sequence[int]) -> None:
        """Give each rank the weight of its share of all counts. Equal counts give exactly ``1 / world_size``.

        Args:
            counts: one for each rank.

        Raises:
            ValueError: if all are 0.
        """
        total = sum(counts)
        if not total:
            raise ValueError(
                "no rank has a sample in this step, so there is no gradient: leave out the step on all ranks"
            )
        self.of_ranks = tuple(count / total for count in counts)


class ScratchPool:
    """Pool of receive memory: allocating fresh pages for every leg costs more than the addition.

    Holds at most as many tensors as were in use at the same time, independent of the groups' sizes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # legs are posted on one thread and reduced on another
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized flat CPU tensor of ``numel`` elements."""
        with self._lock:
            free = self._free.setdefault(dtype, [])
            place = next((i for i, tensor in enumerate(free) if tensor.numel() >= numel), None)
            if place is not None:
                found = free.pop(place)
                return found if found.numel() == numel else found[:numel]
            if free:
                free.pop()  # replace a tensor that is too small
        return torch.empty(numel, dtype=dtype, device="cpu")

    def free(self, tensors: list[Tensor]) -> None:
        """Return tensors of :meth:`allocate` to the pool; nothing may be received into them any more."""
        with self._lock:
            for tensor in tensors:
                whole = tensor if tensor._base is None else tensor._base
                bisect.insort(self._free[tensor.dtype], whole, key=Tensor.numel)

    def clear(self) -> None:
        """Free the memory that is not in use."""
        with self._lock:
            for free in self._free.values():
                free.clear()


def add_in_rank_order(
    own: Tensor,
    rank: int,
    incoming: list[Tensor],
    factors: Sequence[float] | None = None,
    *,
    in_fp32: bool = False,
) -> None:
    """Set ``own`` to ``((x0 + x1) + x2) + ...`` over ranks, rounded to its dtype after each operation.

    Args:
        own: this rank's term, flat; overwritten with the sum.
        rank: position of ``own`` among the terms.
        incoming: the other ranks' terms, flat, in rank order; may be overwritten.
        factors: what the terms are first multiplied by, in rank order; None: nothing.
        in_fp32: add 16-bit terms in fp32, and round once at the end.
    """
    terms = [*incoming[:rank], own, *incoming[rank:]]
    in_fp32 = in_fp32 and own.dtype.itemsize < torch.float32.itemsize and len(terms) > 2  # one addition rounds once
    if factors is None and not in_fp32:
        _add(own, terms)
        return
    # In chunks, which stay in a core's cache between the operations: three ranks, 4 million elements each, take 4 ms on
    # one core, and 13 ms whole.
    is_one_chunk = own.numel() <= CHUNK_NUMEL
    chunks = [(own, *terms)] if is_one_chunk else zip(*(term.split(CHUNK_NUMEL) for term in (own, *terms)), strict=True)
    for target, *parts in chunks:
        if factors is not None:
            for part, factor in zip(parts, factors, strict=True):
                scale_into(part, part, factor)
        if in_fp32:
            wide = parts[0].float()
            for part in parts[1:]:
                wide.add_(part)
            target.copy_(wide)
        else:
            _add(target, parts)


def _add(target: Tensor, terms: list[Tensor]) -> None:
    total = terms[0]
    for term in terms[1:-1]:
        total.add_(term)
    if len(terms) > 1:
        torch.add(total, terms[-1], out=target)
