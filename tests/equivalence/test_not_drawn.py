"""What the fuzzer's table does not have. All other loops, models and optimizers are drawn there."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import gradient_loops
import loops
import wirings
from equivalence import SGD, Case, check_case, optimizer
from matrix import spread
from models import MatrixNet, MixedDtypeNet, OddNet, OneDtypeNet
from optimizers import MUON, OPTIMIZERS

# The stock function knows no largest element of an empty gradient, and Adafactor divides by the number of elements.
WITHOUT_EMPTY = partial(OddNet, empty_parameter=False)

CASES = {
    "state_moves_around_closures": Case(loops.state_moves_around_closures, pipelined=False),
    "clip_norm_max": Case(
        partial(gradient_loops.clip_norm, norm_type=float("inf")), model=WITHOUT_EMPTY, pipelined=False
    ),
    "nan_in_one_rank": Case(gradient_loops.nan_in_one_rank, pipelined=False),
    "inf_in_one_parameter": Case(gradient_loops.inf_in_one_parameter, pipelined=False),
    "stock_scaler_autocast": Case(gradient_loops.scaler_with_autocast, pipelined=False),
    "own_scaler_autocast": Case(partial(gradient_loops.scaler_with_autocast, own=True)),
    "static_graph_one_unused": Case(model=wirings.HalfUsedNet, ddp={"static_graph": True}),
    "checkpoint_reentrant": Case(model=wirings.CheckpointNet, ddp={"static_graph": True}),
    "checkpoint_reentrant_dynamic": Case(model=wirings.CheckpointNet),
}

# Adam's usual eps of 1e-8 is zero in fp16.
FP16_ADAMW = optimizer(torch.optim.AdamW, lr=0.01, eps=1e-4)

CASES_WITH_THEIR_OPTIMIZER = {
    "fp16": Case(model=partial(OneDtypeNet, torch.float16), optimizer=FP16_ADAMW),
    "mixed_fp16": Case(model=partial(MixedDtypeNet, torch.float16), optimizer=FP16_ADAMW),
    "muon": Case(model=MatrixNet, optimizer=MUON),
    "adafactor": Case(model=WITHOUT_EMPTY, optimizer=OPTIMIZERS["adafactor"]),
}

# One sum over shards instead of one over parameters: the norm, and all that is multiplied by it, may differ in the last
# bits. Only a linear optimizer can be held to a tolerance, for Adam divides a gradient by its own size.
OWN_CLIPPING = {
    "max": Case(
        partial(gradient_loops.clip_norm_on_shards, norm_type=float("inf")),
        model=WITHOUT_EMPTY,
        optimizer=SGD,
        exact=False,
    ),
    "norm_3": Case(partial(gradient_loops.clip_norm_on_shards, norm_type=3.0), optimizer=SGD, exact=False),
}


@pytest.mark.parametrize("case", spread(CASES))
def test_case_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", spread(CASES_WITH_THEIR_OPTIMIZER, choose_optimizer=False))
def test_case_with_its_own_optimizer_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", spread(OWN_CLIPPING, choose_optimizer=False))
def test_own_clipping_clips_as_the_stock_function(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)
