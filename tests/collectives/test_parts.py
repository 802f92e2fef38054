"""A fusion buffer of several parts: each rank reduces its slice of every part, whatever their sizes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.make_link import make_link

SIZES = ((1,), (7, 1, 300_000), (0, 5), (2, 3, 2, 1), (131_073,))


def _terms(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def _reduce(dtype: torch.dtype, announced: bool) -> None:
    world_size = dist.get_world_size()
    factor = 1 / world_size
    link = make_link(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=60))
    link.begin_iteration()
    buffers = [FusionBuffer(tuple(_terms(link.rank, sizes, dtype)), factor) for sizes in SIZES]
    if announced:
        for group, buffer in enumerate(buffers):
            link.announce(group, buffer)
    scatters = [link.reduce_scatter(group, buffer) for group, buffer in enumerate(buffers)]
    for group, sizes in enumerate(SIZES):
        expected = _terms(0, sizes, dtype)
        for total in expected:
            total.mul_(factor)
        for rank in range(1, world_size):
            for total, term in zip(expected, _terms(rank, sizes, dtype), strict=True):
                total.add_(term.mul_(factor))
        scatters[group].wait()
        own = FusionBuffer(tuple(expected)).slices(link.rank, world_size)
        torch.testing.assert_close(scatters[group].shards(), own, rtol=0, atol=0)
        link.all_gather(scatters[group], urgency=group).wait()
        torch.testing.assert_close(list(buffers[group].parts), expected, rtol=0, atol=0)
    link.close()


@pytest.mark.quick
@pytest.mark.parametrize("announced", [False, True], ids=["", "announced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sums_are_those_of_all_ranks_in_rank_order(on_ranks, world_size, dtype, announced) -> None:
    on_ranks(_reduce, world_size, dtype, announced)
