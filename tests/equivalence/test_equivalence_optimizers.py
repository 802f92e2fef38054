"""Every optimizer, with every feature that concerns the update itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import forward_loops
import gradient_loops
import loops
import resume_loops
from equivalence import Case, check_case
from models import DeepNet, MatrixNet, OddNet
from optimizers import MUON, OPTIMIZERS
from wirings import SkippingNet

FEATURES = {
    "plain": Case(),
    "deep": Case(model=DeepNet),
    "scheduler": Case(loops.scheduler_made_after_attach),
    "accumulate": Case(loops.accumulate_with_no_sync),
    "zero_grad_in_place": Case(
        loops.zero_grad_in_place_after_step,
        ddp={"gradient_as_bucket_view": True},
        pipelined=False,
    ),
    "sometimes_no_step": Case(loops.sometimes_no_step),
    "drop_a_gradient": Case(gradient_loops.drop_a_gradient, pipelined=False),
    "clip_norm": Case(gradient_loops.clip_norm, pipelined=False),
    "clip_on_shards_inactive": Case(gradient_loops.clip_norm_on_shards_inactive),
    "stock_scaler": Case(gradient_loops.scaler, pipelined=False),
    "own_scaler": Case(partial(gradient_loops.scaler, own=True)),
    "unused_parameters": Case(model=SkippingNet, ddp={"find_unused_parameters": True}),
    "evaluate_between_steps": Case(forward_loops.evaluate_between_steps),
    "restore_optimizer_state": Case(forward_loops.restore_optimizer_state),
    "resume": Case(partial(resume_loops.resume, after="step"), steps=resume_loops.STEPS),
}

WITHOUT_BIAS = {
    OddNet: MatrixNet,
    DeepNet: partial(DeepNet, bias=False),
    SkippingNet: partial(SkippingNet, bias=False),
}
# Muon takes only matrices, and Adafactor divides by the number of elements.
MODELS_FOR = {
    "muon": WITHOUT_BIAS,
    "adafactor": {OddNet: partial(OddNet, empty_parameter=False)},
}


# Each optimizer meets the scheduler and a quarter of the rest; each of the rest meets a quarter of the optimizers.
WITH_ALL = "scheduler"
PAIRS = [
    (name, feature)
    for row, name in enumerate([*OPTIMIZERS, "muon"])
    for column, feature in enumerate(FEATURES)
    if feature == WITH_ALL or (row + column) % 4 == 0
]


@pytest.mark.parametrize(("name", "feature"), PAIRS)
def test_optimizer_is_exact(on_ranks, name: str, feature: str) -> None:
    case = FEATURES[feature]
    model = MODELS_FOR.get(name, {}).get(case.model, case.model)
    optimizer = MUON if name == "muon" else OPTIMIZERS[name]
    check_case(replace(case, model=model, optimizer=optimizer), on_ranks)
