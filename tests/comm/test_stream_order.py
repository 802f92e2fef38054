"""The CUDA paths, without CUDA: whoever uses a fusion buffer or a parameter on one stream is ordered behind whoever
wrote it on another.

The real `NcclLink` and `Pipeline` train on fake streams (`fake_streams`), which count every access that nothing orders.
Each wait that is taken out must show, or the zero would prove nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover import device
from ddp_crossover.comm.stream_order import CudaStreams, StreamOrder
from ddp_crossover.nccl import nccl_link
from fake_streams import FakeStream, Gpu, fake_gpu
from gpu_check_parts.training import Job, Recipe

ADAMW = {"lr": 0.01}
RECIPES = {
    "adamw": Recipe("AdamW", ADAMW),
    "apart_from_buckets": Recipe(bucket_view=False, set_to_none=False),
    "stock_clipping": Recipe(clip="stock"),
    "own_clipping": Recipe(clip="own"),
    "accumulation_strict": Recipe(accumulate=2, strict=True),
    "own_scaler_and_clipping": Recipe("AdamW", ADAMW, scaler="own", clip="own"),
    "stock_scaler": Recipe(scaler="stock"),
}


def races_of(recipe: Recipe, waits_for_legs: bool) -> dict[tuple[str, str], int]:
    with ExitStack() as stack:
        gpu = stack.enter_context(fake_gpu(gather_writes="own" not in (recipe.clip, recipe.scaler)))
        if not waits_for_legs:
            stack.enter_context(mock.patch.object(nccl_link._NcclLeg, "wait", lambda *args: None))
        job = Job(recipe, torch.device("cpu"), 0, True)
        job.train()
        stats = job.state.stats()
        job.close()
    assert stats.pipelined_iterations > stats.iterations // 2
    assert gpu.seen > 100
    return dict(gpu.races)


@pytest.mark.parametrize("name", RECIPES)
def test_legs_and_training_are_ordered(on_ranks, name) -> None:
    assert on_ranks(races_of, 1, RECIPES[name], True) == [{}]


@pytest.mark.parametrize("name", ["adamw", "own_clipping"])
def test_a_missing_wait_for_legs_is_noticed(on_ranks, name) -> None:
    (races,) = on_ranks(races_of, 1, RECIPES[name], False)
    assert races


class Branches(nn.Module):
    """Two layers of one fusion group on two streams, ordered for their inputs and outputs as CUDA asks."""

    def __init__(self, gpu: Gpu, side_first: bool) -> None:
        super().__init__()
        self.here, self.aside = nn.Linear(24, 10), nn.Linear(24, 10)
        self._gpu = gpu
        self._side = FakeStream()
        self._side_first = side_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._side.wait_stream(self._gpu.main)
        y = None if self._side_first else self.here(x)
        with self._gpu.on(self._side):  # as `with torch.Stream():`, which nobody notices
            z = self.aside(x)
        y = self.here(x) if y is None else y
        self._gpu.main.wait_stream(self._side)
        return y + z


def races_of_branches(side_first: bool, clip: bool, join: bool) -> dict[tuple[str, str], int]:
    with ExitStack() as stack:
        gpu = stack.enter_context(fake_gpu(gather_writes=not clip))
        if not join:
            stack.enter_context(mock.patch.object(StreamOrder, "join", lambda order: None))
        ddp = DistributedDataParallel(Branches(gpu, side_first))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        state = dx.attach(ddp, optimizer, fusion_mb=1.0)
        for parameter in ddp.parameters():
            gpu.watch(parameter)
        for _ in range(8):
            optimizer.zero_grad()
            ddp(torch.randn(4, 24)).square().mean().backward()
            if clip:
                state.clip_grad_norm_(0.1)
            optimizer.step()
        assert state.stats().deferred_steps > 2
        state.detach()
    return dict(gpu.races)


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clip"])
@pytest.mark.parametrize("side_first", [False, True], ids=["main_first", "side_first"])
def test_an_update_on_one_stream_is_seen_on_another(on_ranks, side_first, clip) -> None:
    assert on_ranks(races_of_branches, 1, side_first, clip, True) == [{}]


def test_a_missing_order_of_streams_is_noticed(on_ranks) -> None:
    (races,) = on_ranks(races_of_branches, 1, False, False, False)
    assert races


def clip_and_look_at_order() -> tuple[int, int]:
    """How often a norm was exchanged while gather legs were out, and how often it had to wait for them."""
    exchanged = waited = 0
    exchange = nccl_link.NcclLink.all_gather_small

    def watch_exchange(link: nccl_link.NcclLink, value: torch.Tensor) -> torch.Tensor:
        nonlocal exchanged, waited
        legs, caller = link._stream, gpu.current
        ordered_before = caller.clock[legs]
        rows = exchange(link, value)
        exchanged += ordered_before < legs.clock[legs]
        waited += caller.clock[legs] > ordered_before
        return rows

    with (
        fake_gpu(gather_writes=False) as gpu,
        mock.patch.object(nccl_link.NcclLink, "all_gather_small", watch_exchange),
    ):
        job = Job(Recipe(clip="own"), torch.device("cpu"), 0, True)
        job.train()
        job.close()
    return exchanged, waited


def test_a_norm_does_not_queue_behind_gather_legs(on_ranks) -> None:
    ((exchanged, waited),) = on_ranks(clip_and_look_at_order, 1)
    assert exchanged > 5
    assert waited == 0


def memory_and_groups() -> None:
    with fake_gpu() as gpu:
        job = Job(Recipe(), torch.device("cpu"), 0, True)
        job.train()
        link = job.state._link
        assert {(storage, link._stream) for storage in gpu.watched} <= gpu.recorded
        with mock.patch.object(dist, "destroy_process_group") as destroy:
            groups = [link.process_group, link._small_group]
            link.shut_down()
            destroy.assert_not_called()
        job.close()
    for group in groups:
        with pytest.raises(ValueError, match=r"[Ii]nvalid process group"):
            dist.destroy_process_group(group)


def test_fusion_buffers_outlive_their_legs_and_only_close_destroys_groups(on_ranks) -> None:
    on_ranks(memory_and_groups, 1)


def capture_with_pending_updates() -> None:
    with fake_gpu() as gpu:
        ddp = DistributedDataParallel(nn.Linear(24, 10))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        state = dx.attach(ddp, optimizer, fusion_mb=1.0)
        for _ in range(8):
            optimizer.zero_grad()
            ddp(torch.randn(4, 24)).square().mean().backward()
            optimizer.step()
        capturing = mock.patch.object(device, "is_capturing", lambda device: True)
        with capturing, pytest.raises(RuntimeError, match=r"state\.synchronize\(\) before the capture"):
            ddp.module(torch.randn(4, 24))
        state.synchronize()
        with capturing:
            ddp.module(torch.randn(4, 24))
        state.detach()
        assert not gpu.races


def test_a_capture_that_would_have_to_wait_says_what_to_do(on_ranks) -> None:
    on_ranks(capture_with_pending_updates, 1)


def publish_beside_a_capture() -> tuple[bool, bool]:
    """Whether a stream waits that another thread records into a graph, and whether it does once that has ended."""
    with fake_gpu() as gpu:
        order, recorded = StreamOrder(CudaStreams(torch.device("cpu"), ())), FakeStream()
        gpu.streams.note(recorded)
        with mock.patch.object(device, "is_recorded", lambda stream: stream is recorded):
            order.publish()
        before = recorded.clock[gpu.main] > 0
        order.switched_to(recorded)
        return before, recorded.clock[gpu.main] > 0


def test_a_stream_under_capture_waits_when_it_is_switched_to_afterwards(on_ranks) -> None:
    assert on_ranks(publish_beside_a_capture, 1) == [(False, True)]
