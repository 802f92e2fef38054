"""What codes have left out, on a rank that codes a part of each group only, as with nodes: nothing else changes it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_crossover.addons.codes.feedback import Feedback
from ddp_crossover.addons.codes.wire import CodedWire, wire_of
from ddp_crossover.fusion import FusionPlan
from ddp_crossover.plan.cutting import plan_fusion
from ddp_crossover.plan.gradient_specs import gradient_specs
from ddp_crossover.top_k import TopK

pytestmark = pytest.mark.quick

LINK: Any = SimpleNamespace(world_size=4, shard_align_bytes=1, codes_on_host=True)
SIZES_MB = (1e-4, 3e-4, 1e-3, 8.0)
NAMED = [
    (name, p) for name, p in nn.Sequential(nn.Linear(13, 17), nn.Linear(17, 11), nn.Linear(11, 5)).named_parameters()
]
WIRE = wire_of(None, TopK(0.25, selector="exact"))
assert isinstance(WIRE, CodedWire)
SPECS = gradient_specs(NAMED, WIRE)


def _plan(fusion_mb: float) -> FusionPlan:
    order = list(reversed(range(len(NAMED))))
    return plan_fusion(SPECS, order, list(range(len(NAMED))), world_size=LINK.world_size, fusion_mb=fusion_mb)


def _step(feedback: Feedback, plan: FusionPlan, codings: list, scale: float = 1.0) -> set[tuple[str, int]]:
    """Code the first half of each group; returns the elements of parameters that were coded."""
    feedback.begin_step(scale)
    touched = set()
    for group, coding in codings:
        half = group.numel // 2
        coding.encode(torch.randn(half), 0, half, torch.empty(coding.scatter.payload_bytes(half), dtype=torch.uint8))
        for piece, low in zip(group.pieces, plan.places_of(group), strict=True):
            name = SPECS[piece.parameter].name
            touched |= {(name, piece.start + i) for i in range(piece.numel) if low + i < half}
    feedback.end_step([], [])
    return touched


def _codings(feedback: Feedback, plan: FusionPlan) -> list:
    feedback.use(plan)
    coded = [group for group in plan.groups if SPECS[group.pieces[0].parameter].is_coded]
    return [(group, feedback.travel(group).coding) for group in coded]


def _untouched(state: dict, touched: set[tuple[str, int]]) -> dict[tuple[str, int], float]:
    return {
        (name, i): float(value)
        for name, values in state["residual"].items()
        for i, value in enumerate(values)
        if (name, i) not in touched
    }


@pytest.mark.parametrize("seed", range(5))
def test_what_this_rank_does_not_code_stays_when_plans_change(seed) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    feedback = Feedback(WIRE, SPECS, LINK, torch.device("cpu"))
    scale, kept = 1.0, 0
    for _ in range(6):
        before = feedback.state_dict()["residual"]
        plan = _plan(draw.choice(SIZES_MB))
        codings = _codings(feedback, plan)
        for name, values in before.items():
            assert torch.equal(feedback.state_dict()["residual"][name], values), "moved wrongly"
        for _ in range(draw.randint(1, 4)):
            before = feedback.state_dict()
            ratio = draw.choice((1.0, 1.0, 2.0))
            scale *= ratio
            touched = _step(feedback, plan, codings, scale)
            now = _untouched(feedback.state_dict(), touched)
            expected = {key: ratio * value for key, value in _untouched(before, touched).items()}
            assert now == expected
            kept += sum(value != 0 for value in now.values())
    assert kept > 0, "all residuals were of what this rank codes: this shows nothing"


def test_loaded_residuals_stay_where_this_rank_codes_nothing() -> None:
    residual = {spec.name: torch.randn(spec.numel) for spec in SPECS if spec.is_coded}
    saved = {"steps": 3, "scale": 1.0, "residual": residual}
    feedback = Feedback(WIRE, SPECS, LINK, torch.device("cpu"))
    plan = _plan(1e-3)
    codings = _codings(feedback, plan)
    feedback.load_state_dict(saved)
    for _ in range(3):
        touched = _step(feedback, plan, codings)
        assert _untouched(feedback.state_dict(), touched) == _untouched(saved, touched)
