"""Adasum: a reduction that adds what is orthogonal and averages what is parallel.

Two vectors become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, ranks in a tree of neighbours, each parameter by itself.
The result is a sum of c_i g_i whose factors follow from the Gram matrix of the ranks' vectors alone. So each rank
receives its slice of all vectors, as in a reduce-scatter; Gram matrices of slices are added up, which is a few numbers
for each parameter; each rank sums up its slice, and slices are gathered. Bytes are those of an all-reduce.

Source: arXiv 2006.02924; the way by Gram matrices is ours. NaN and infinity come out as they would of a sum.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_TINY = sys.float_info.min**0.5


def factors(gram: Tensor) -> Tensor:
    """By what each rank's vector is multiplied before they are added up.

    Args:
        gram: products of the ranks' vectors, ``[..., ranks, ranks]``, fp64.

    Returns:
        ``[..., ranks]``, fp64.
    """
    ranks = gram.shape[-1]
    sums = list(torch.eye(ranks, dtype=gram.dtype, device=gram.device).expand_as(gram).unbind(-2))
    while len(sums) > 1:
        pairs = [_pair(one, other, gram) for one, other in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs + sums[2 * len(pairs) :]
    return sums[0]


def _pair(one: Tensor, other: Tensor, gram: Tensor) -> Tensor:
    of_other = (gram @ other.unsqueeze(-1)).squeeze(-1)
    product = (one * of_other).sum(-1)
    squares = ((one * (gram @ one.unsqueeze(-1)).squeeze(-1)).sum(-1), (other * of_other).sum(-1))
    first, second = (
        torch.where(square < _TINY, 1.0, 1.0 - product / (2.0 * square.clamp(min=_TINY))) for square in squares
    )
    return first.unsqueeze(-1) * one + second.unsqueeze(-1) * other


class AdasumExchange:
    """Sends tensors like the parameters and brings their Adasum over ranks.

    Args:
        like: a tensor of each shape and dtype, in the same order on all ranks.
        process_group: a process group that nobody else uses.
    """

    feedback = None

    def __init__(self, like: Sequence[Tensor], process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self._ranks, self._rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in like))
        numels = [tensor.numel() for tensor in like]
        self._slice = -(-sum(numels) // self._ranks)
        self._flat = torch.zeros(self._slice * self._ranks, dtype=dtype, device=like[0].device)
        self._received = torch.empty_like(self._flat)
        self._views = [
            part.view_as(tensor) for part, tensor in zip(self._flat[: sum(numels)].split(numels), like, strict=True)
        ]
        self._work: dist.Work | None = None
        # Which part of this rank's slice belongs to which tensor.
        self._pieces: list[tuple[int, slice]] = []
        low, end = 0, self._rank * self._slice
        for index, numel in enumerate(numels):
            first, last = max(low - end, 0), min(low + numel - end, self._slice)
            if first < last:
                self._pieces.append((index, slice(first, last)))
            low += numel
        self.sent_bytes = 0

    @torch.no_grad()
    def start(self, tensors: Iterable[Tensor]) -> None:
        """Send slices of this rank's tensors."""
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)
        self._work = dist.all_to_all_single(self._received, self._flat, group=self._group, async_op=True)

    @torch.no_grad()
    def finish(self) -> Sequence[Tensor]:
        """Wait for the ranks' slices, then reduce and gather them, in the widest dtype of the tensors."""
        work, self._work = self._work, None
        if work is None:
            return self._views
        work.wait()
        slices = self._received.view(self._ranks, self._slice)
        gram = torch.zeros(len(self._views), self._ranks, self._ranks, dtype=torch.float64, device=slices.device)
        for index, place in self._pieces:
            piece = slices[:, place].double()
            gram[index] = piece @ piece.T
        dist.all_reduce(gram, group=self._group)
        by_tensor = factors(gram)
        own = torch.zeros(self._slice, dtype=self._flat.dtype, device=slices.device)
        for index, place in self._pieces:
            own[place] = (by_tensor[index] @ slices[:, place].double()).to(own.dtype)
        dist.all_gather_into_tensor(self._flat, own, group=self._group)
        of_slices, of_gram = (self._ranks - 1) * own.nbytes, (self._ranks - 1) * gram.nbytes // self._ranks
        self.sent_bytes += 2 * (of_slices + of_gram)
        return self._views

    @torch.no_grad()
    def bring(self, means: Sequence[Tensor]) -> None:
        """Have :meth:`finish` return what an earlier run has received."""
        for view, mean in zip(self._views, means, strict=True):
            view.copy_(mean)
