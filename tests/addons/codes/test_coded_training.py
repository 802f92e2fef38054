"""Training with coded gradients on real ranks, and in one process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import ddp_crossover as dx
from coded_runs import ADAM, MOMENTUM_SGD, SGD, Coded, compare_with_one_process
from models import ChannelsLastNet, OneDtypeNet
from node_groups import INTERLEAVED, TWO_BY_TWO

OnRanks = Callable[..., list[Any]]

INT8: dict[str, Any] = {"wire_dtype": torch.int8}
SPARSE: dict[str, Any] = {"compress": dx.TopK(density=0.05)}
SMALL_VIEWS = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}
CASES = {
    "int8": Coded(INT8),
    "int8, adam": Coded(INT8, ADAM, looks=False),
    "int8 without feedback": Coded(INT8, feedback=False),
    "int8, bucket views": Coded(INT8, ADAM, ddp=SMALL_VIEWS, looks=False),
    "top-k, adam": Coded(SPARSE, ADAM, looks=False),
    "top-k and int8": Coded(SPARSE | INT8, MOMENTUM_SGD),
    "top-k and bf16": Coded(SPARSE | {"wire_dtype": torch.bfloat16}, ADAM),
    "exact": Coded({"compress": dx.TopK(0.05, "exact")}),
    "chunked in one large group": Coded({"compress": dx.TopK(0.05, "chunked"), "fusion_mb": 1.0}),
    "warmup": Coded({"compress": dx.TopK(0.01, "exact", warmup=[(2, 0.5), (1, 0.1)])}, MOMENTUM_SGD),
    "dear": Coded(INT8 | {"schedule": "dear"}, ADAM, looks=False),
    "bf16 parameters": Coded(SPARSE | INT8, model=partial(OneDtypeNet, torch.bfloat16)),
    "fp64 parameters": Coded(SPARSE | INT8, model=partial(OneDtypeNet, torch.float64)),
    "channels last": Coded(SPARSE | INT8, model=ChannelsLastNet),
}
QUICK = ("top-k and int8",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.quick if name in QUICK else ()) for name in CASES]
)
def test_two_ranks(on_ranks: OnRanks, name: str) -> None:
    on_ranks(compare_with_one_process, 2, CASES[name])


@pytest.mark.parametrize(("name", "world_size"), [("int8", 4), ("top-k and int8", 3)])
def test_more_ranks(on_ranks: OnRanks, name: str, world_size: int) -> None:
    on_ranks(compare_with_one_process, world_size, CASES[name])


NODES = {
    "int8, and parameters as they are": Coded(INT8, SGD, nodes=TWO_BY_TWO),
    "top-k": Coded(SPARSE, ADAM, nodes=INTERLEAVED),
    "top-k and int8": Coded(SPARSE | INT8, MOMENTUM_SGD, nodes=INTERLEAVED, looks=False),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes(on_ranks: OnRanks, name: str) -> None:
    case = NODES[name]
    on_ranks(compare_with_one_process, 4, replace(case, options={**case.options, "groups": "node"}))
