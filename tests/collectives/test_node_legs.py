"""Legs of two rounds on real ranks: sums of any size, ranks that are ahead, many legs at once, and bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_late_peers import _soon
from test_wire_bytes import STEPS, TOLERANCE, WideNet, _sent_in_steady_state
from torch import nn

import ddp_crossover as dx
from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.gloo_leg import GlooGatherLeg
from ddp_crossover.collectives.link import Link
from ddp_crossover.collectives.make_link import make_link
from ddp_crossover.collectives.nccl_link import NcclLink
from ddp_crossover.collectives.nodes import Nodes
from equivalence import SGD, Case, Run, plain_loop
from harness import run_ranks
from leg_sums import check_sums, terms_of
from models import HIDDEN, INPUTS, OUTPUTS, DeepNet
from node_groups import (
    CROSSED,
    INTERLEAVED,
    THREE_ON_ONE,
    TWO_BY_TWO,
    TWO_NODES,
    Layout,
    NodeOrder,
    add_up,
    check_on_nodes,
    on_nodes,
    world_size,
)

SIZES = ((1,), (7, 1, 30_000), (0, 5), (2, 3, 2, 1), (131_073,))
# More gather legs than the threads of a link that wait for them.
MANY = 150
SOON_S = 60.0


def _link(layout: Layout) -> Link:
    link = make_link(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=SOON_S))
    link.use_nodes(Nodes.of(layout, link.rank))
    link.begin_iteration()
    return link


def _sums(layout: Layout, sizes: tuple[int, ...], dtype: torch.dtype, factor: float) -> list[torch.Tensor]:
    terms = [[term.mul(factor) for term in terms_of(rank, sizes, dtype)] for rank in range(world_size(layout))]
    return [add_up(list(of_ranks), NodeOrder(layout)) for of_ranks in zip(*terms, strict=True)]


def _reduce(layout: Layout, dtype: torch.dtype, announced: bool) -> None:
    link = _link(layout)
    sums = [_sums(layout, sizes, dtype, 1 / link.world_size) for sizes in SIZES]
    check_sums(link, SIZES, sums, dtype, announced=announced)


@pytest.mark.quick
@pytest.mark.parametrize("announced", [False, True], ids=["", "announced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [TWO_BY_TWO, INTERLEAVED, CROSSED, THREE_ON_ONE], ids=str)
def test_sums_are_in_node_order_whatever_the_sizes(on_ranks, layout, dtype, announced) -> None:
    on_ranks(_reduce, world_size(layout), layout, dtype, announced)


def test_a_link_that_adds_up_by_itself_keeps_its_slices() -> None:
    """NCCL reduces slice r on rank r, whatever the nodes are: norms of shards must look there."""
    link = NcclLink.__new__(NcclLink)
    link.rank, link.world_size = 1, 4
    link.nodes = Nodes.flat(1, 4)
    link.use_nodes(Nodes.of(TWO_BY_TWO, 1))  # which numbers its slice 2
    assert link.shard == 1


# Many legs, and ranks at different speeds.


def _gather_in_opposite_orders(layout: Layout, seed: int | None) -> None:
    """Each rank posts its gather legs in an order of its own, as use orders may be; with a seed, now and then."""
    link = _link(layout)
    draw = random.Random(f"{seed} {link.rank}")
    buffers = [FusionBuffer(tuple(terms_of(link.rank, (group + 1,)))) for group in range(MANY)]
    scatters = [link.reduce_scatter(group, buffer) for group, buffer in enumerate(buffers)]
    for scatter in scatters:
        scatter.wait()
    order = list(range(MANY))
    if seed is not None:
        draw.shuffle(order)
    elif link.rank % 2:
        order.reverse()
    gathers = []
    for count, group in enumerate(order):
        # Without urgency: in this very order. Half of them are under way before the others are posted.
        gathers.append(link.all_gather(scatters[group]))
        if seed is None and count == MANY // 2:
            time.sleep(1.0)
        elif seed is not None and draw.random() < 0.05:
            time.sleep(0.02)
    for gather in gathers:
        gather.wait()
    for group, buffer in enumerate(buffers):
        expected = _sums(layout, (group + 1,), torch.float32, 1.0)
        torch.testing.assert_close(list(buffer.parts), expected, rtol=0, atol=0)
    link.close()


@pytest.mark.parametrize(("layout", "seed"), [(TWO_BY_TWO, None), (INTERLEAVED, 1)], ids=["opposite", "random"])
def test_more_gather_legs_than_waiting_threads_do_not_lock_up(on_ranks, layout, seed) -> None:
    on_ranks(_gather_in_opposite_orders, 4, layout, seed, timeout_s=20)


class VeryDeepNet(nn.Sequential):
    """Each weight and each bias in a group of its own: 70 groups."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Linear(INPUTS, HIDDEN)]
        for _ in range(33):
            layers += [nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)]
        super().__init__(*layers, nn.Linear(HIDDEN, OUTPUTS))


@pytest.mark.nightly
def test_a_deep_net_in_tiny_groups_is_exact(on_ranks) -> None:
    case = Case(model=VeryDeepNet, optimizer=SGD, steps=4, dear={"fusion_mb": 1e-5}, pipelined=False)
    check_on_nodes(case, TWO_BY_TWO, on_ranks)


def _in_random_order(run: Run, seed: int) -> Iterator[Any]:
    """Every rank posts its gather legs when it likes, and comes late to backward when it likes."""
    draw = random.Random(1000 * seed + run.rank)
    posted: list[int] = []
    post, post_again = GlooGatherLeg.post, GlooGatherLeg._post_again

    def post_later(leg: GlooGatherLeg) -> None:
        time.sleep(draw.choice((0, 0, 2e-3)))
        posted.append(leg.group)
        post(leg)

    def post_again_later(leg: GlooGatherLeg) -> None:
        time.sleep(draw.choice((0, 0, 2e-3)))
        post_again(leg)

    with (
        mock.patch.object(GlooGatherLeg, "post", post_later),
        mock.patch.object(GlooGatherLeg, "_post_again", post_again_later),
    ):
        run.attach()
        run.model.module[6].weight.register_hook(lambda _: time.sleep(draw.choice((0, 0, 0, 5e-3))))
        yield from plain_loop(run)
        run.synchronize()
    if run.with_dear:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, posted)
        assert any(other != posted for other in of_ranks), "all ranks have chosen the same order: this shows nothing"


def _slow_on_one_rank(run: Run, slow: int) -> Iterator[Any]:
    if run.rank == slow:
        run.model.module[6].weight.register_hook(lambda _: time.sleep(0.02))
    yield from plain_loop(run)


@pytest.mark.parametrize("layout", [TWO_BY_TWO, INTERLEAVED, THREE_ON_ONE], ids=str)
def test_ranks_that_send_in_different_orders_are_exact(on_ranks, layout) -> None:
    case = Case(partial(_in_random_order, seed=3), model=DeepNet, ddp={"bucket_cap_mb": 1e-4})
    check_on_nodes(case, layout, on_ranks)


@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_rank_changes_nothing(on_ranks, slow) -> None:
    case = Case(partial(_slow_on_one_rank, slow=slow), model=DeepNet, optimizer=SGD, ddp={"bucket_cap_mb": 1e-4})
    check_on_nodes(case, TWO_BY_TWO, on_ranks)


def _lines_about_a_late_rank(layout: Layout, late: int) -> list[str]:
    with _soon() as lines:
        link = _link(layout)
        buffer = FusionBuffer((torch.ones(8),))
        if link.rank == late:
            time.sleep(2.5)
        scatter = link.reduce_scatter(0, buffer)
        scatter.wait()
        link.all_gather(scatter).wait()
        link.close()
        return [line for line in lines if "has waited" in line]


def test_a_rank_that_waits_for_its_own_node_is_not_blamed(on_ranks) -> None:
    of_ranks = on_ranks(_lines_about_a_late_rank, 4, TWO_BY_TWO, 3)
    assert any("rank 3 has not sent its part; the job ends" in line for line in of_ranks[2])
    assert any("rank 2 has not sent its part, unless it waits for another rank itself" in line for line in of_ranks[0])


# Bytes.


def _sent(case: Case, layout: Layout) -> tuple[float, float]:
    with on_nodes(layout):
        return _sent_in_steady_state(case, True)


@pytest.mark.parametrize("layout", [TWO_BY_TWO, TWO_NODES], ids=str)
def test_dense_legs_send_what_an_all_reduce_of_all_ranks_does(layout) -> None:
    """(l - 1) / l of the gradients inside of the node, (n - 1) / n of a rank's l-th across n nodes, and back."""
    count = world_size(layout)
    size = sum(p.nbytes for p in _wide_fp32_net().parameters())
    case = Case(
        model=_wide_fp32_net, world_size=count, steps=2 * STEPS, dear={"fusion_mb": 0.5, "groups": "node"}, strict=False
    )
    for counted, claimed in run_ranks(_sent, count, case, layout):
        assert counted == pytest.approx(2 * (count - 1) / count * size, rel=TOLERANCE)
        assert claimed == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.parametrize("wire", ["sparse", "int8"])
def test_bytes_are_those_of_the_papers_arithmetic(wire) -> None:
    """With n ranks a node, d elements, and k of each slice: 2 (n - 1) / n 4 d inside of it, 8 k across two of them."""
    density = 0.05
    dear: dict[str, Any] = {"groups": "node", "fusion_mb": 0.5}
    dear |= {"compress": dx.TopK(density, selector="exact")} if wire == "sparse" else {"wire_dtype": torch.int8}
    case = Case(model=_wide_fp32_net, world_size=4, steps=2 * STEPS, dear=dear, strict=False)
    coded = sum(p.numel() for p in _wide_fp32_net().parameters() if p.dim() > 1)
    dense = sum(p.numel() for p in _wide_fp32_net().parameters() if p.dim() == 1)
    inside = 2 * 1 / 2 * 4 * coded
    # A rank's half of the elements: sparse, it sends it to its one peer; in codes, a half of that half in each leg.
    across = 8 * density * coded / 2 if wire == "sparse" else 2 * (coded / 4) * 66 / 64
    expected = inside + across + 2 * 3 / 4 * 4 * dense
    for counted, claimed in run_ranks(_sent, 4, case, TWO_BY_TWO):
        assert counted == pytest.approx(expected, rel=TOLERANCE)
        assert claimed == pytest.approx(counted, rel=TOLERANCE)


def _wide_fp32_net() -> WideNet:
    return WideNet(torch.float32)
