"""Legs on real ranks, of one round or, with nodes, of two: sums of any size, many legs at once, and bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_late_peers import _soon
from test_wire_bytes import STEPS, TOLERANCE, WideNet, _sent_in_steady_state

import ddp_crossover as dx
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.nodes import Nodes
from ddp_crossover.comm.sums import RankWeights
from ddp_crossover.nccl.make_link import make_link
from ddp_crossover.nccl.nccl_link import NcclLink
from equivalence import Case
from harness import run_ranks
from node_groups import (
    CROSSED,
    THREE_NODES,
    THREE_ON_ONE,
    TWO_BY_TWO,
    TWO_NODES,
    Layout,
    NodeOrder,
    add_up,
    on_nodes,
    world_size,
)

SIZES = ((1,), (7, 1, 300_000), (0, 5), (2, 3, 2, 1), (131_073,))
LONE: Layout = ((0,),)
# More gather legs than the threads of a link that wait for them.
MANY = 150
SOON_S = 60.0


def _link(layout: Layout) -> Link:
    link = make_link(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=SOON_S))
    link.use_nodes(Nodes.of(layout, link.rank))
    link.begin_iteration()
    return link


def terms_of(rank: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What a rank contributes to the parts of a buffer of these sizes."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def _sums(layout: Layout, sizes: Sequence[int], dtype: torch.dtype, factor: float) -> list[torch.Tensor]:
    terms = [[term.mul(factor) for term in terms_of(rank, sizes, dtype)] for rank in range(world_size(layout))]
    return [add_up(list(of_ranks), NodeOrder(layout)) for of_ranks in zip(*terms, strict=True)]


def _reduce(layout: Layout, dtype: torch.dtype, announced: bool) -> None:
    """Every rank gets its shards of the sums, and then all of them, bit for bit."""
    link = _link(layout)
    weights = RankWeights(link.rank, link.world_size)
    buffers = [FusionBuffer(tuple(terms_of(link.rank, sizes, dtype)), weights) for sizes in SIZES]
    if announced:
        for group, buffer in enumerate(buffers):
            link.announce(group, buffer)
    scatters = [link.reduce_scatter(group, buffer) for group, buffer in enumerate(buffers)]
    for group, sizes in enumerate(SIZES):
        expected = _sums(layout, sizes, dtype, 1 / link.world_size)
        scatters[group].wait()
        own = FusionBuffer(tuple(expected)).slices(link.shard, link.world_size)
        torch.testing.assert_close(scatters[group].shards(), own, rtol=0, atol=0)
        link.all_gather(scatters[group], urgency=group).wait()
        torch.testing.assert_close(list(buffers[group].parts), expected, rtol=0, atol=0)
    link.close()


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "announced"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
@pytest.mark.parametrize("layout", [LONE, TWO_NODES, THREE_NODES, THREE_ON_ONE, TWO_BY_TWO, CROSSED], ids=str)
def test_sums_are_in_the_order_of_nodes_whatever_the_sizes(on_ranks, layout, dtype, announced) -> None:
    """Where each rank is a node of its own: in rank order."""
    on_ranks(_reduce, world_size(layout), layout, dtype, announced)


def test_a_link_that_adds_up_by_itself_keeps_its_slices() -> None:
    """NCCL reduces slice r on rank r, whatever the nodes are: norms of shards must look there."""
    link = NcclLink.__new__(NcclLink)
    link.rank, link.world_size = 1, 4
    link.nodes = Nodes.flat(1, 4)
    link.use_nodes(Nodes.of(TWO_BY_TWO, 1))  # which numbers its slice 2
    assert link.shard == 1


def _gather_in_opposite_orders(layout: Layout) -> None:
    """Each rank posts its gather legs in an order of its own, as use orders may be."""
    link = _link(layout)
    buffers = [FusionBuffer(tuple(terms_of(link.rank, (group + 1,)))) for group in range(MANY)]
    scatters = [link.reduce_scatter(group, buffer) for group, buffer in enumerate(buffers)]
    for scatter in scatters:
        scatter.wait()
    gathers = []
    for count, group in enumerate(reversed(range(MANY)) if link.rank % 2 else range(MANY)):
        # Without urgency: in this very order. Half of them are under way before the others are posted.
        gathers.append(link.all_gather(scatters[group]))
        if count == MANY // 2:
            time.sleep(1.0)
    for gather in gathers:
        gather.wait()
    for group, buffer in enumerate(buffers):
        expected = _sums(layout, (group + 1,), torch.float32, 1.0)
        torch.testing.assert_close(list(buffer.parts), expected, rtol=0, atol=0)
    link.close()


def test_more_gather_legs_than_waiting_threads_do_not_lock_up(on_ranks) -> None:
    on_ranks(_gather_in_opposite_orders, 4, TWO_BY_TWO, timeout_s=20)


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
        return _sent_in_steady_state(case)


@pytest.mark.parametrize("wire", ["dense", "sparse", "int8"])
def test_bytes_are_those_of_the_papers_arithmetic(wire) -> None:
    """With n ranks a node, d elements, and k of each slice: 2 (n - 1) / n 4 d inside of it, 8 k across two of them.
    Dense legs send what an all-reduce of all ranks does.
    """
    density = 0.05
    wires: dict[str, dict[str, Any]] = {
        "dense": {},
        "sparse": {"compress": dx.TopK(density, selector="exact")},
        "int8": {"wire_dtype": torch.int8},
    }
    dear = {"groups": "node", "fusion_mb": 0.5} | wires[wire]
    case = Case(model=_wide_fp32_net, world_size=4, steps=2 * STEPS, dear=dear, strict=False)
    coded = sum(p.numel() for p in _wide_fp32_net().parameters() if p.dim() > 1)
    dense = sum(p.numel() for p in _wide_fp32_net().parameters() if p.dim() == 1)
    inside = 2 * 1 / 2 * 4 * coded
    # A rank's half of the elements: sparse, it sends it to its one peer; else a half of that half in each leg.
    across = {"dense": 2 * coded / 4 * 4, "sparse": 8 * density * coded / 2, "int8": 2 * coded / 4 * 66 / 64}[wire]
    expected = inside + across + 2 * 3 / 4 * 4 * dense
    for counted, claimed in run_ranks(_sent, 4, case, TWO_BY_TWO):
        assert counted == pytest.approx(expected, rel=TOLERANCE)
        assert claimed == pytest.approx(counted, rel=TOLERANCE)


def _wide_fp32_net() -> WideNet:
    return WideNet(torch.float32)
