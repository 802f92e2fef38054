"""Training with coded gradients on real ranks, and in one process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import ddp_crossover as dx
from coded_runs import ADAM, MOMENTUM_SGD, SGD, Coded, compare_with_one_process

OnRanks = Callable[..., list[Any]]

INT8: dict[str, Any] = {"wire_dtype": torch.int8}
SPARSE = dx.TopK(density=0.05)
CASES = {
    "int8": Coded(INT8),
    "int8, adam": Coded(INT8, ADAM, looks=False),
    "int8 without feedback": Coded(INT8, feedback=False),
    "top-k": Coded({"compress": SPARSE}),
    "top-k, adam": Coded({"compress": SPARSE}, ADAM, looks=False),
    "top-k without feedback": Coded({"compress": SPARSE}, MOMENTUM_SGD, feedback=False),
    "top-k and int8": Coded({"compress": SPARSE} | INT8, MOMENTUM_SGD),
    "top-k and bf16": Coded({"compress": SPARSE, "wire_dtype": torch.bfloat16}, ADAM),
    "exact": Coded({"compress": dx.TopK(0.05, "exact")}),
    "chunked in one large group": Coded({"compress": dx.TopK(0.05, "chunked"), "fusion_mb": 1.0}),
    "warmup": Coded({"compress": dx.TopK(0.01, "exact", warmup=[(2, 0.5), (1, 0.1)])}, MOMENTUM_SGD),
    "dear": Coded(INT8 | {"schedule": "dear"}, ADAM, looks=False),
}


QUICK = ("top-k and int8",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.quick if name in QUICK else ()) for name in CASES]
)
def test_two_ranks(on_ranks: OnRanks, name: str) -> None:
    on_ranks(compare_with_one_process, 2, CASES[name])


@pytest.mark.parametrize("name", ["int8", "top-k and int8"])
def test_four_ranks(on_ranks: OnRanks, name: str) -> None:
    on_ranks(compare_with_one_process, 4, CASES[name])


def test_three_ranks(on_ranks: OnRanks) -> None:
    on_ranks(compare_with_one_process, 3, CASES["top-k and int8"])


NODES = {
    "plain wire of one-dimensional parameters": Coded(INT8 | {"groups": "node"}, SGD),
    "top-k": Coded({"compress": SPARSE, "groups": "node"}, ADAM),
    "top-k and int8": Coded({"compress": SPARSE, "groups": "node"} | INT8, MOMENTUM_SGD, looks=False),
}


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 2), (1, 3))], ids=str)
@pytest.mark.parametrize("name", NODES)
def test_nodes(on_ranks: OnRanks, name: str, nodes: tuple[tuple[int, ...], ...]) -> None:
    on_ranks(compare_with_one_process, 4, replace(NODES[name], nodes=nodes))
