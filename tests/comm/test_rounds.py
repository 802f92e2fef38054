"""Who exchanges slices with whom, and both legs of a fusion group, round by round, on any nodes: all ranks in one
process, without a network.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_crossover.addons.codes.block_int8 import BlockInt8
from ddp_crossover.addons.codes.codec import Codec
from ddp_crossover.addons.codes.coding import BeforeAfter, Coding
from ddp_crossover.addons.codes.rounds import CodedTravel
from ddp_crossover.addons.codes.top_k import Selector, TopKCodec
from ddp_crossover.comm.fusion_buffer import FusionBuffer, Memory
from ddp_crossover.comm.nodes import Nodes
from ddp_crossover.comm.round import Round, Rounds
from ddp_crossover.comm.rounds import rounds_of
from ddp_crossover.comm.sums import RankWeights, ScratchPool
from node_groups import INTERLEAVED, TWO_BY_TWO, Layout, NodeOrder, add_up, world_size

THREE_BY_TWO: Layout = ((0, 5), (1, 3), (2, 4))
TWO_BY_THREE: Layout = ((0, 2, 4), (1, 3, 5))
THREE_BY_THREE: Layout = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
FOUR_ON_ONE: Layout = ((0, 1, 2, 3),)
FOUR_NODES: Layout = ((0,), (1,), (2,), (3,))
# With three nodes the order of sums over nodes shows, with three ranks that inside of a node.
ALL = [TWO_BY_TWO, INTERLEAVED, THREE_BY_TWO, TWO_BY_THREE, THREE_BY_THREE, FOUR_ON_ONE, FOUR_NODES]


def _routes(layout: Layout, buffers: list[FusionBuffer], in_fp32: bool = False) -> list[Rounds]:
    return [
        rounds_of(Memory(buffer), Nodes.of(layout, rank), ScratchPool(), sums_in_fp32=in_fp32)
        for rank, buffer in enumerate(buffers)
    ]


def _exchange(rounds: list[Round]) -> None:
    """One round of all ranks: messages between two ranks match in their order, as they do with one tag."""
    boxes: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for rank, one in enumerate(rounds):
        for peer, memory in one.receives():
            boxes[peer, rank].append(memory)
    messages = [(rank, peer, memory.clone()) for rank, one in enumerate(rounds) for peer, memory in one.sends()]
    for rank, peer, memory in messages:
        boxes[rank, peer].pop(0).copy_(memory)
    assert not any(boxes.values()), "something was not sent"
    for one in rounds:
        one.finish()


def _leg(routes: list[Rounds], leg: str) -> None:
    of_ranks = [getattr(route, leg) for route in routes]
    for number in range(len(of_ranks[0])):
        _exchange([rounds[number] for rounds in of_ranks])


def _run(routes: list[Rounds]) -> None:
    _leg(routes, "scatter")
    _leg(routes, "gather")
    for route in routes:
        route.release()


def _terms(count: int, sizes: list[int], dtype: torch.dtype, seed: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(size, generator=generator).to(dtype) for size in sizes] for _ in range(count)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Equally many ranks on each node, dealt out at random, as nodes are found: in the order of their lowest ranks."""
    size, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = draw(st.permutations(range(size * count)))
    return tuple(sorted(tuple(sorted(ranks[i * size : (i + 1) * size])) for i in range(count)))


@settings(max_examples=150, deadline=None)
@given(
    layouts(),
    st.lists(st.integers(0, 50), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
)
def test_dense_sums_are_in_node_order(layout: Layout, sizes: list[int], dtype: torch.dtype, in_fp32: bool) -> None:
    count = world_size(layout)
    terms = _terms(count, sizes, dtype)
    factor = 1 / count
    order = NodeOrder(layout, torch.bfloat16 if in_fp32 else None)
    expected = [add_up([part.mul(factor) for part in parts], order) for parts in zip(*terms, strict=True)]
    buffers = [FusionBuffer(tuple(part.clone() for part in parts), RankWeights(0, count)) for parts in terms]
    routes = _routes(layout, buffers, in_fp32)
    _leg(routes, "scatter")
    shard_of, *others = [Nodes.of(layout, rank).shard_of for rank in range(count)]
    assert sorted(shard_of) == list(range(count)) and all(other == shard_of for other in others)
    for number, buffer in zip(shard_of, buffers, strict=True):
        of_sum = FusionBuffer(tuple(expected)).slices(number, count)
        assert all(map(torch.equal, buffer.slices(number, count), of_sum))
    _leg(routes, "gather")
    for buffer in buffers:
        assert all(torch.equal(part, total) for part, total in zip(buffer.parts, expected, strict=True))


def test_one_rank_on_each_node_is_no_grouping() -> None:
    for rank in range(3):
        assert Nodes.of([[0], [1], [2]], rank) == Nodes.flat(rank, 3)
    assert not Nodes.flat(0, 3).are_several


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ([[0, 1], [2]], "equally many ranks on each node, got 2, 1.*leave out groups="),
        ([[], [0]], "equally many ranks on each node, got 0, 1.*leave out groups="),
    ],
)
def test_other_nodes_are_refused(layout: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Nodes.of(layout, 0)


@pytest.mark.parametrize("layout", ALL, ids=str)
def test_16_bit_terms_are_rounded_once_in_each_round(layout) -> None:
    terms = _terms(world_size(layout), [500], torch.bfloat16)
    buffers = [FusionBuffer((term.clone(),)) for [term] in terms]
    _run(_routes(layout, buffers, in_fp32=True))
    expected = add_up([term for [term] in terms], NodeOrder(layout, torch.bfloat16))
    assert all(torch.equal(buffer.whole(), expected) for buffer in buffers)


def _coded(
    terms: list[torch.Tensor], scatter: Codec, gather: Codec | None, residuals: list[BeforeAfter]
) -> list[FusionBuffer]:
    buffers = []
    for term, residual in zip(terms, residuals, strict=True):
        coding = Coding(scatter, gather)
        coding.begin_step(scatter, residual)
        buffers.append(FusionBuffer((term.clone(),), travel=CodedTravel(coding)))
    return buffers


def _no_residuals(count: int, numel: int) -> list[BeforeAfter]:
    return [BeforeAfter(torch.zeros(numel), torch.zeros(numel)) for _ in range(count)]


@pytest.mark.parametrize("layout", ALL, ids=str)
def test_a_sparse_code_of_everything_is_the_dense_sum(layout) -> None:
    count = world_size(layout)
    terms = [term for [term] in _terms(count, [10 * count], torch.float32)]
    buffers = _coded(terms, TopKCodec(1.0, Selector.EXACT), None, _no_residuals(count, 10 * count))
    _run(_routes(layout, buffers))
    assert all(torch.equal(buffer.whole(), add_up(terms, NodeOrder(layout))) for buffer in buffers)


@pytest.mark.parametrize("layout", ALL, ids=str)
@pytest.mark.parametrize("scatter", ["sparse", "int8"])
def test_codes_give_everybody_the_same_and_lose_nothing(layout, scatter) -> None:
    count = world_size(layout)
    numel = 64 * count
    codec: Codec = BlockInt8() if scatter == "int8" else TopKCodec(0.3, Selector.EXACT)
    residuals = _no_residuals(count, numel)
    due = torch.zeros(numel, dtype=torch.float64)
    for step in range(4):
        terms = [term for [term] in _terms(count, [numel], torch.float32, step)]
        buffers = _coded(terms, codec, BlockInt8(), residuals)
        _run(_routes(layout, buffers))
        residuals = [BeforeAfter(residual.after, residual.before) for residual in residuals]
        for buffer in buffers:
            assert torch.equal(buffer.whole(), buffers[0].whole())
        due += sum(term.double() for term in terms) - buffers[0].whole()
        owed = sum(residual.before.double() for residual in residuals)
        torch.testing.assert_close(owed, due, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("scatter", ["sparse", "int8"])
def test_every_rank_sees_that_a_sum_is_not_finite(scatter, bad) -> None:
    """Else some ranks would take their residuals over, and others would not."""
    numel = 64 * 6
    codec: Codec = BlockInt8() if scatter == "int8" else TopKCodec(0.1, Selector.EXACT)
    for place in range(0, numel, 37):
        terms = [term for [term] in _terms(6, [numel], torch.float32)]
        terms[4][place] = bad
        buffers = _coded(terms, codec, None if scatter == "sparse" else codec, _no_residuals(6, numel))
        _run(_routes(THREE_BY_TWO, buffers))
        of_ranks = [all(b.travel.coding.finite) for b in buffers if isinstance(b.travel, CodedTravel)]
        assert of_ranks == [False] * 6
