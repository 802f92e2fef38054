"""Low precision: parameter dtypes, autocast, and gradient scalers with their skipped steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import gradient_loops as loops
from equivalence import SGD, Case, check_case, optimizer
from loops import every_optimizer_steps
from matrix import spread
from models import BatchNormNet, MixedDtypeNet, OneDtypeNet
from optimizers import grouped, interleaved_optimizers

PRECISION = {
    "bf16": Case(model=partial(OneDtypeNet, torch.bfloat16)),
    "fp64": Case(model=partial(OneDtypeNet, torch.float64)),
    "mixed_bf16": Case(model=partial(MixedDtypeNet, torch.bfloat16)),
    "mixed_fp64_bucket_view": Case(model=partial(MixedDtypeNet, torch.float64), ddp={"gradient_as_bucket_view": True}),
    "autocast": Case(loops.autocast),
    "autocast_batch_norm": Case(loops.autocast, model=BatchNormNet),
    # The stock scaler reads all gradients before the step, which gives up the overlap.
    "stock_scaler": Case(loops.scaler, pipelined=False),
    "stock_scaler_clip": Case(partial(loops.scaler, clip=True), pipelined=False),
    "stock_scaler_autocast": Case(loops.scaler_with_autocast, pipelined=False),
    "stock_scaler_mixed": Case(loops.scaler, model=partial(MixedDtypeNet, torch.bfloat16), pipelined=False),
    "own_scaler": Case(partial(loops.scaler, own=True)),
    "own_scaler_autocast": Case(partial(loops.scaler_with_autocast, own=True)),
    "own_scaler_bucket_view": Case(partial(loops.scaler, own=True), ddp={"gradient_as_bucket_view": True}),
}

# Adam's usual eps of 1e-8 is zero in fp16.
FP16_ADAMW = optimizer(torch.optim.AdamW, lr=0.01, eps=1e-4)

PRECISION_WITH_ITS_OPTIMIZER = {
    "fp16": Case(model=partial(OneDtypeNet, torch.float16), optimizer=FP16_ADAMW),
    "fp16_sgd": Case(model=partial(OneDtypeNet, torch.float16), optimizer=SGD),
    "mixed_fp16": Case(model=partial(MixedDtypeNet, torch.float16), optimizer=FP16_ADAMW),
    "mixed_two_optimizers": Case(
        every_optimizer_steps,
        model=partial(MixedDtypeNet, torch.bfloat16),
        optimizer=interleaved_optimizers,
    ),
    "stock_scaler_two_optimizers": Case(loops.scaler, optimizer=interleaved_optimizers, pipelined=False),
    "own_scaler_two_optimizers": Case(partial(loops.scaler, own=True), optimizer=interleaved_optimizers),
    "own_scaler_param_groups": Case(partial(loops.scaler, own=True), optimizer=grouped),
}


@pytest.mark.parametrize("case", spread(PRECISION, quick=("bf16", "own_scaler", "stock_scaler")))
def test_precision_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


@pytest.mark.parametrize("case", spread(PRECISION_WITH_ITS_OPTIMIZER, choose_optimizer=False))
def test_precision_with_its_own_optimizer_is_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)
