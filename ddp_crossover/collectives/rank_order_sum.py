"""Adding up what peers have sent: in rank order, so that runs repeat bit for bit."""

from __future__ import annotations

import bisect
import threading

import torch
from torch import Tensor

from ddp_crossover.collectives.wire import CHUNK_NUMEL


class ScratchPool:
    """Receive memory, kept: fresh pages for every leg cost more than the addition.

    Holds no more tensors than were in use at once, whatever the sizes of the groups.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # legs are posted on one thread and reduced on another
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Memory for as many elements as ``like`` has."""
        numel = like.numel()
        with self._lock:
            free = self._free.setdefault(like.dtype, [])
            place = next((i for i, tensor in enumerate(free) if tensor.numel() >= numel), None)
            if place is not None:
                return free.pop(place)[:numel]
            if free:
                free.pop()  # one that is too small makes room for one that is not
        # Pinned, channels-last or otherwise special memory is of no use here.
        return torch.empty(numel, dtype=like.dtype)

    def give_back(self, tensors: list[Tensor]) -> None:
        """Nothing is received there any more."""
        with self._lock:
            for tensor in tensors:
                whole = tensor if tensor._base is None else tensor._base
                bisect.insort(self._free[tensor.dtype], whole, key=Tensor.numel)

    def clear(self) -> None:
        """Give up what is free."""
        with self._lock:
            for free in self._free.values():
                free.clear()


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
