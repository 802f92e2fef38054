"""Runs both legs of some fusion buffers of several parts, and compares with the sums that they should bring."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.link import Link
from ddp_crossover.collectives.sums import RankWeights


def terms_of(rank: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What a rank contributes to the parts of a buffer of these sizes."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def check_sums(
    link: Link,
    sizes_of_groups: Sequence[Sequence[int]],
    sums_of_groups: Sequence[Sequence[torch.Tensor]],
    dtype: torch.dtype,
    *,
    announced: bool,
) -> None:
    """Every rank gets its shards of these sums, and then all of them, bit for bit; the link is closed."""
    weights = RankWeights(link.rank, link.world_size)
    buffers = [FusionBuffer(tuple(terms_of(link.rank, sizes, dtype)), weights) for sizes in sizes_of_groups]
    if announced:
        for group, buffer in enumerate(buffers):
            link.announce(group, buffer)
    scatters = [link.reduce_scatter(group, buffer) for group, buffer in enumerate(buffers)]
    for group, expected in enumerate(sums_of_groups):
        scatters[group].wait()
        own = FusionBuffer(tuple(expected)).slices(link.shard, link.world_size)
        torch.testing.assert_close(scatters[group].shards(), own, rtol=0, atol=0)
        link.all_gather(scatters[group], urgency=group).wait()
        torch.testing.assert_close(list(buffers[group].parts), list(expected), rtol=0, atol=0)
    link.close()
