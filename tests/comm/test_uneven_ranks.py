"""Ranks that are ahead of others: they send before they are asked, and no order of events changes a bit."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.gloo_leg import GlooGatherLeg
from ddp_crossover.comm.gloo_link import GlooLink
from ddp_crossover.comm.sums import ScratchPool
from equivalence import Case, Run, plain_loop
from models import DeepNet
from node_groups import INTERLEAVED, THREE_NODES, THREE_ON_ONE, TWO_NODES, check_on_nodes

SLOW_S = 0.05
STEPS = 12
SMALL_BUCKETS = {"bucket_cap_mb": 1e-4}  # so that gradients arrive one by one


def _slow_in_backward(run: Run, seconds: Any) -> None:
    """Sleep `seconds()` in the middle of each backward."""

    def sleep(gradient: torch.Tensor) -> None:
        time.sleep(seconds())

    run.model.module[6].weight.register_hook(sleep)


def _arrived_early() -> list[bool]:
    """On the slow rank: whether the fast one's part of the next group was there before this rank had its own."""
    run = Run(Case(model=DeepNet, steps=STEPS, ddp=SMALL_BUCKETS), with_dear=True)
    run.attach()
    is_slow = run.rank == 1
    woken = False
    seen: list[bool] = []

    def seconds() -> float:
        nonlocal woken
        woken = True
        return SLOW_S

    if is_slow:
        _slow_in_backward(run, seconds)
    allocate, start = ScratchPool.allocate, GlooLink.reduce_scatter

    def allocate_nan(pool: ScratchPool, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(pool, numel, dtype).fill_(float("nan"))

    def look(link: GlooLink, group: int, buffer: FusionBuffer, landing: FusionBuffer | None = None) -> Any:
        nonlocal woken
        if woken and run.state.plan is not None:
            woken = False
            leg = link.early_receives.legs.get(group)
            incoming = [] if leg is None else leg.rounds.scatter[0].incoming  # type: ignore[attr-defined]
            seen.append(bool(incoming) and not any(memory.isnan().any() for memory in incoming))
        return start(link, group, buffer, landing)

    with mock.patch.object(ScratchPool, "allocate", allocate_nan), mock.patch.object(GlooLink, "reduce_scatter", look):
        for _ in plain_loop(run):
            pass
    run.detach()
    return seen


def test_a_rank_that_is_ahead_does_not_wait_with_its_scatter_legs(on_ranks) -> None:
    fast, slow = on_ranks(_arrived_early, 2)
    assert fast == []
    assert len(slow) > STEPS // 2
    assert any(slow)  # not each time: on a busy machine the fast rank may be the slow one


def _in_random_order(run: Run, seed: int) -> Iterator[Any]:
    """Every rank posts its gather legs when it likes, and comes late to backward when it likes."""
    draw = random.Random(1000 * seed + run.rank)
    posted: list[int] = []
    post, post_again = GlooGatherLeg.post, GlooGatherLeg._post_again

    def post_later(leg: GlooGatherLeg) -> None:
        time.sleep(draw.choice((0, 0, 2e-3)))  # meanwhile more become ready, of which the most urgent goes first
        posted.append(leg.group)
        post(leg)

    def post_again_later(leg: GlooGatherLeg) -> None:  # inside of a node
        time.sleep(draw.choice((0, 0, 2e-3)))
        post_again(leg)

    with (
        mock.patch.object(GlooGatherLeg, "post", post_later),
        mock.patch.object(GlooGatherLeg, "_post_again", post_again_later),
    ):
        run.attach()
        _slow_in_backward(run, lambda: draw.choice((0, 0, 0, 5e-3)))
        yield from plain_loop(run)
        run.synchronize()
    if run.with_dear:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, posted)
        assert any(other != posted for other in of_ranks), "all ranks have chosen the same order: this shows nothing"


@pytest.mark.parametrize("layout", [TWO_NODES, THREE_NODES, THREE_ON_ONE, INTERLEAVED], ids=str)
def test_ranks_that_send_in_different_orders_are_exact(on_ranks, layout) -> None:
    check_on_nodes(Case(partial(_in_random_order, seed=3), model=DeepNet, ddp=SMALL_BUCKETS), layout, on_ranks)
