"""Adding up what peers have sent: in rank order, so that runs repeat bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor


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


def add_in_rank_order(own: Tensor, rank: int, incoming: list[Tensor]) -> None:
    """``own`` becomes ``((x0 + x1) + x2) + ...`` over ranks, rounded after each addition."""
    terms = [*incoming[:rank], own, *incoming[rank:]]
    if len(terms) == 1:
        return
    total = terms[0]
    for term in terms[1:-1]:
        total.add_(term)
    torch.add(total, terms[-1], out=own)
