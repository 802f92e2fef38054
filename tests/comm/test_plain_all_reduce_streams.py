"""Plain all-reduces over NCCL, on a model of streams: backward goes on while they run, and whoever uses a sum is
ordered behind its all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.addons.ddp_timer import DdpTimer
from ddp_crossover.hook.reducer import Reducer
from equivalence import snapshot
from fake_streams import fake_gpu
from models import INPUTS, DeepNet

STEPS = 5


class Seen(NamedTuple):
    """What became of the all-reduces.

    Attributes:
        count: how many there were.
        stalls: those that backward's stream was ordered behind when the hook returned.
        races: accesses to the memory that is sent, or to DDP's buckets, that nothing orders.
        unrecorded: all-reduces on streams of which the memory's allocator does not know.
        parameters: in the end.
    """

    count: int
    stalls: int
    races: dict[tuple[str, str], int]
    unrecorded: int
    parameters: dict[str, torch.Tensor]


def _plain(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    dx.attach(ddp, optimizer, schedule="allreduce")


def _cast(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    dx.attach(ddp, optimizer, schedule="allreduce", wire_dtype=torch.float16)


def _without_hook(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    pass


def _timed(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    dx.DdpTimer(ddp, optimizer)


ATTACH = {"plain": _plain, "cast": _cast, "timed": _timed, "without hook": _without_hook}
HOOKS = ("plain", "cast", "timed")


def train(how: str, bucket_view: bool, ddp_waits: bool = True) -> Seen:
    stalls = 0
    torch.manual_seed(7)
    with ExitStack() as stack:
        gpu = stack.enter_context(fake_gpu(ddp_waits=ddp_waits, keeps_reduced=True))

        def looking(hook: Callable[..., Any]) -> Callable[..., Any]:
            def call(state: Any, bucket: Any) -> Any:
                nonlocal stalls
                gpu.watch(bucket.buffer())
                before = len(gpu.all_reduces)
                future = hook(state, bucket)
                stalls += sum(gpu.current.clock[done.stream] >= done.time for done in gpu.all_reduces[before:])
                return future

            return call

        for owner in (Reducer, DdpTimer):
            stack.enter_context(mock.patch.object(owner, "reduce", looking(owner.reduce)))
        ddp = DistributedDataParallel(DeepNet(), bucket_cap_mb=0.001, gradient_as_bucket_view=bucket_view)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        ATTACH[how](ddp, optimizer)
        for _ in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(3, INPUTS)).square().mean().backward()
            optimizer.step()
    unrecorded = sum((done.address, done.stream) not in gpu.recorded for done in gpu.all_reduces)
    return Seen(len(gpu.all_reduces), stalls, dict(gpu.races), unrecorded, snapshot(ddp.module.state_dict()))


@pytest.mark.parametrize("bucket_view", [False, True], ids=["copied", "bucket_view"])
@pytest.mark.parametrize("how", HOOKS)
def test_backward_goes_on_and_sums_are_waited_for(on_ranks, how, bucket_view) -> None:
    (seen,) = on_ranks(train, 1, how, bucket_view)
    assert seen.count > STEPS
    assert seen.stalls == 0
    assert seen.races == {}
    assert seen.unrecorded == 0


def test_a_missing_wait_for_the_futures_is_noticed(on_ranks) -> None:
    (seen,) = on_ranks(train, 1, "plain", True, False)
    assert seen.races


@pytest.mark.parametrize("how", ["plain", "timed"])
def test_the_sums_are_those_of_ddp_without_a_hook(on_ranks, how) -> None:
    ranks, plain = on_ranks(train, 2, how, True), on_ranks(train, 2, "without hook", True)
    for seen, expected in zip(ranks, plain, strict=True):
        assert not expected.count
        for name, value in expected.parameters.items():
            assert torch.equal(seen.parameters[name], value), name
