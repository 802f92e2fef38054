"""Who shares with whom, and Adasum, by themselves; test_relaxed_training.py has the training."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_relaxed_training import relaxed
from torch import Tensor

from ddp_crossover.addons.relaxed import LocalSGD
from ddp_crossover.addons.relaxed.adasum import AdasumExchange, factors
from ddp_crossover.addons.relaxed.partners import lines, shape_of
from relaxed_reference import adam, adasum, flat

NO_LIMIT = 10**9


# Grids.


def test_every_rank_is_in_one_line_of_each_dimension() -> None:
    assert [shape_of("grid", n) for n in (4, 6, 8, 9, 12)] == [(2, 2), (2, 3), (2, 4), (3, 3), (3, 4)]
    assert [shape_of("pairs", n) for n in (2, 4, 8)] == [(2,), (2, 2), (2, 2, 2)]
    for shape in ((2, 3), (2, 2, 2), (4, 2)):
        for of_dimension in lines(shape):
            assert sorted(itertools.chain(*of_dimension)) == list(range(math.prod(shape)))


@pytest.mark.parametrize(
    ("groups", "world_size", "named"),
    [
        ("grid", 3, "3 is no product"),
        ("grid", 2, "2 is no product"),
        ("pairs", 6, "there are 6"),
        ("pairs", 1, "are 1"),
    ],
)
def test_ranks_that_make_no_grid_are_refused(groups, world_size, named) -> None:
    with pytest.raises(ValueError, match=named):
        shape_of(groups, world_size)


def _means_of_a_grid(groups: str) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    with relaxed(LocalSGD(every=NO_LIMIT, groups=groups), adam) as one:
        one.train(3)
        before = torch.stack(one.of_ranks(flat(one.ddp.module))).mean(dim=0)
        after_rounds = []
        for _ in shape_of(groups, one.world_size):
            one.state._merge.send()
            one.state._merge.merge()
            after_rounds.append(torch.stack(one.of_ranks(flat(one.ddp.module))).mean(dim=0))
        return after_rounds, before, one.of_ranks(flat(one.ddp.module))


@pytest.mark.parametrize(("groups", "world_size"), [("grid", 4), ("pairs", 4), ("pairs", 2)])
def test_as_many_rounds_as_dimensions_make_the_mean_of_all(on_ranks, groups, world_size) -> None:
    for after_rounds, before, of_ranks in on_ranks(_means_of_a_grid, world_size, groups):
        assert all(torch.equal(one, of_ranks[0]) for one in of_ranks)
        for mean in (*after_rounds, of_ranks[0]):
            torch.testing.assert_close(mean, before, rtol=1e-12, atol=1e-12)


# Adasum.


def _by_gram(vectors: Tensor) -> Tensor:
    return factors(vectors @ vectors.T) @ vectors


@pytest.mark.quick
@given(st.sampled_from([1, 2, 3, 4, 5, 8]), st.integers(8, 40), st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_the_tree_and_the_gram_matrix_agree(ranks, numel, seed, alike) -> None:
    # Not of vectors that nearly cancel out, as short and opposite ones do: nothing but rounding is left of their sum.
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(ranks, numel, generator=generator, dtype=torch.float64)
    vectors = vectors + 5 * alike * vectors[0]
    torch.testing.assert_close(_by_gram(vectors), adasum(vectors), rtol=1e-12, atol=1e-11)


def test_what_adasum_does_with_special_vectors() -> None:
    one, other = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    assert torch.equal(_by_gram(torch.stack([one, other])), one + other), "orthogonal ones are added"
    assert torch.equal(_by_gram(torch.stack([one] * 4)), one), "parallel ones are averaged"
    assert torch.equal(_by_gram(torch.stack([one, -one])), torch.zeros_like(one)), "opposite ones leave nothing"
    assert torch.equal(_by_gram(torch.stack([0 * one, other])), other), "zeros do not count"
    assert torch.equal(_by_gram(torch.stack([one, 2 * one, 3 * one])), 2.25 * one), "three of them, by their tree"
    vectors = torch.randn(5, 7, dtype=torch.float64)
    assert torch.equal(_by_gram(vectors * 2.0**40), _by_gram(vectors) * 2.0**40), "any scale is as good"


def _moves(parts: int) -> Tensor:
    """Adasum of vectors of ranks that are cut over slices, and of one rank with zeros."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (1,), (17,), ())]
    if rank == 0:
        tensors[2].zero_()
    gathered = [[torch.empty_like(tensor) for _ in range(parts)] for tensor in tensors]
    for tensor, of_ranks in zip(tensors, gathered, strict=True):
        dist.all_gather(of_ranks, tensor)
    exchange = AdasumExchange(tensors, dist.new_group())
    exchange.start(iter(tensors))
    for ours, of_ranks in zip(exchange.finish(), gathered, strict=True):
        expected = adasum([one.flatten() for one in of_ranks]).view_as(ours)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    return torch.cat([one.flatten() for one in exchange.finish()])


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_parameter_may_be_cut_over_slices(on_ranks, world_size) -> None:
    results = on_ranks(_moves, world_size, world_size)
    assert all(torch.equal(one, results[0]) for one in results)
