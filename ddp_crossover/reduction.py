"""Adding up what peers have sent: in rank order, so that runs repeat bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_crossover.wire import CHUNK_NUMEL


class ScratchPool:
    """Receive memory, kept: fresh pages for every leg cost more than the addition."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        free = self._free.get((like.dtype, like.numel()))
        # Pinned, channels-last or otherwise special memory is of no use here.
        return free.pop() if free else torch.empty(like.numel(), dtype=like.dtype)

    def give_back(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._free.setdefault((tensor.dtype, tensor.numel()), []).append(tensor)

    def clear(self) -> None:
        """Give up what is free."""
        self._free.clear()


def add_in_rank_order(own: Tensor, rank: int, incoming: list[Tensor], *, in_fp32: bool = False) -> None:
    """``own`` becomes ``((x0 + x1) + x2) + ...`` over ranks, rounded to its dtype after each addition.

    Args:
        own: this rank's term, flat.
        rank: its place among the terms.
        incoming: the other ranks' terms, in rank order.
        in_fp32: add 16-bit terms up in fp32, and round once at the end.
    """
    terms = [*incoming[:rank], own, *incoming[rank:]]
    if len(terms) == 1:
        return
    if in_fp32 and own.dtype.itemsize < torch.float32.itemsize and len(terms) > 2:  # one addition rounds once anyway
        for target, first, *others in zip(*(term.split(CHUNK_NUMEL) for term in (own, *terms)), strict=True):
            wide = first.float()
            for other in others:
                wide.add_(other)
            target.copy_(wide)
        return
    total = terms[0]
    for term in terms[1:-1]:
        total.add_(term)
    torch.add(total, terms[-1], out=own)
