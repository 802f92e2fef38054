"""Legs of CUDA tensors on gloo, without CUDA: the same messages, from and to memory that is on the host anyway."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp_crossover import device as gpu
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.gloo_messages import Connection
from ddp_crossover.comm.pace import SocketBacklog
from ddp_crossover.nccl.staged_gloo_link import StagedGlooLink
from fake_streams import FakeEvent, FakeStream


def sums(world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of a few groups at once, over two iterations."""
    device, stream, make = torch.device("cpu"), FakeStream(), torch.empty

    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    replacements = [
        (gpu, "new_stream", FakeStream),
        (gpu, "record", FakeEvent),
        (gpu, "on_stream", nullcontext),
        (gpu, "current_stream", lambda *device: stream),
        (gpu, "sleep_until", lambda event: None),
        (torch, "empty", empty),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        link = StagedGlooLink([Connection(dist.new_group(), dist.new_group())], device, SocketBacklog([]))
        results = []
        for iteration in range(2):
            link.begin_iteration()
            buffers = [
                torch.full((world_size * numel,), float(10**link.rank + iteration), dtype=dtype) for numel in (1, 5, 40)
            ]
            for group, buffer in enumerate(buffers):
                link.announce(group, buffer)
            scatters = [link.reduce_scatter(group, FusionBuffer((buffer,))) for group, buffer in enumerate(buffers)]
            for gather in [link.all_gather(scatter, urgency) for urgency, scatter in enumerate(scatters)]:
                gather.wait()
            results += buffers
        link.close()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_the_sum_over_all_ranks(on_ranks, world_size, dtype) -> None:
    for results in on_ranks(sums, world_size, world_size, dtype):
        for index, result in enumerate(results):
            terms = [10**rank + index // 3 for rank in range(world_size)]
            assert torch.equal(result, torch.full_like(result, sum(terms)))
