"""A fusion buffer of several parts: each rank reduces its slice of every part, whatever their sizes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddp_crossover.collectives.make_link import make_link
from leg_sums import check_sums, terms_of

SIZES = ((1,), (7, 1, 300_000), (0, 5), (2, 3, 2, 1), (131_073,))


def _reduce(dtype: torch.dtype, announced: bool) -> None:
    link = make_link(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=60))
    link.begin_iteration()
    sums = []
    for sizes in SIZES:
        first, *others = (
            [term.mul_(1 / link.world_size) for term in terms_of(rank, sizes, dtype)] for rank in range(link.world_size)
        )
        for terms in others:
            for total, term in zip(first, terms, strict=True):
                total.add_(term)
        sums.append(first)
    check_sums(link, SIZES, sums, dtype, announced=announced)


@pytest.mark.quick
@pytest.mark.parametrize("announced", [False, True], ids=["", "announced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sums_are_those_of_all_ranks_in_rank_order(on_ranks, world_size, dtype, announced) -> None:
    on_ranks(_reduce, world_size, dtype, announced)
