"""Batches of different sizes on the ranks: the training of one process on all samples.

The fuzzer compares with plain DDP whose losses are weighted by hand, in all loops but those that are here.
"""

from __future__ import annotations

import pytest
import torch

import weighted_loops as loops
from matrix import often
from node_groups import INTERLEAVED, TWO_BY_TWO, Layout, on_nodes
from weighted_loops import Weighted, train_both


@pytest.mark.parametrize(
    ("split", "world_size"),
    [
        ("random", 2),
        ("random", 3),
        pytest.param("zeros", 3, marks=pytest.mark.quick),
        ("zeros", 4),
        ("one", 3),
        ("equal", 2),
    ],
)
def test_any_partition_is_training_on_the_whole_batch(on_ranks, split, world_size) -> None:
    on_ranks(train_both, world_size, Weighted(loops.plain, split=split))


def test_one_rank_alone_overflows(on_ranks) -> None:
    on_ranks(train_both, 2, Weighted(loops.scaled, dtype=torch.float32))


def test_two_reduced_backwards_in_one_batch(on_ranks) -> None:
    on_ranks(train_both, 3, Weighted(loops.two_losses))


@pytest.mark.parametrize("loop", [loops.empty_batches, loops.dummy_batches], ids=lambda one: one.__name__)
@pytest.mark.parametrize("view", often([False, True], True))
def test_gradients_of_a_rank_without_samples_count_for_nothing(on_ranks, loop, view) -> None:
    on_ranks(train_both, 3, Weighted(loop, split="zeros", ddp={"gradient_as_bucket_view": view}))


def _train_on_nodes(layout: Layout, case: Weighted) -> None:
    with on_nodes(layout):
        train_both(case)


@pytest.mark.parametrize(
    ("loop", "layout"),
    [(loops.empty_batches, TWO_BY_TWO), (loops.clipped, INTERLEAVED)],
    ids=["empty_batches-two_by_two", "clipped-interleaved"],
)
def test_on_nodes(on_ranks, loop, layout) -> None:
    on_ranks(_train_on_nodes, 4, layout, Weighted(loop, split="zeros", dear={"groups": "node"}))


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_a_rank_without_samples_adds_nothing_to_codes(on_ranks, wire_dtype) -> None:
    dear = {"wire_dtype": wire_dtype, "tune": False}
    case = Weighted(loops.empty_batches, dtype=torch.float32, split="zeros", dear=dear, tolerance=0.02)
    on_ranks(train_both, 3, case)
