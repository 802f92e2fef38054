"""`print(state)` and `stats().flat()`: what is in force, with figures that loggers take, at any point of a training."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.report.clock import CommSums
from ddp_crossover.report.stats import DearStats, StepLog, summary
from equivalence import Case, Run, train_step
from models import DeepNet

pytestmark = pytest.mark.quick

STEPS = 8
PROMETHEUS = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def _shown(options: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What the state shows, and what it says of tuning: after attach, in the middle, after detach."""
    run = Run(Case(model=DeepNet, steps=STEPS, dear={"fusion_mb": None} | options), with_dear=True)
    run.attach()
    shown = {}

    def note(when: str) -> None:
        shown[when] = (repr(run.state), run.state.tuning_progress())

    note("attached")
    for index, (x, y) in enumerate(run.batches()):
        train_step(run, x, y)
        if index == 3:
            note("first plan")
    note("trained")
    assert repr(run.state) and run.model.module[0].weight is not None  # an update may be pending
    run.detach()
    note("detached")
    return shown


def test_a_state_shows_what_is_in_force(on_ranks) -> None:
    first, second = on_ranks(_shown, 2, {"fusion_mb": 1e-3})
    before, _ = first["attached"]
    assert before.splitlines()[0].startswith("DearState of DeepNet, ")
    assert "rank 0 of 2 over gloo" in before and "plain all-reduces" in before and "last step" not in before
    after, _ = first["trained"]
    assert "schedule auto" in after and ".weight" in after and "KiB in all" in after
    assert re.search(r"last step \S+ ms, \S+ ms of it exposed", after) and "hid their all-gathers" in after
    assert len(after.splitlines()) < 12
    assert "rank 1 of 2" in second["trained"][0]
    detached, _ = first["detached"]
    assert "detached: the model trains as plain DDP does" in detached and "last step" not in detached


@pytest.mark.parametrize(
    ("options", "attached", "first_plan"),
    [
        ({}, "group sizes, plain all-reduces and DDP as it was are tried", "measuring the compute times"),
        ({"tune": False}, "then the plan that should be the fastest", "measuring the compute times"),
        ({"fusion_mb": 0.5}, "schedule auto with groups of 0.5 MiB", "not tuned: schedule auto with groups of 0.5 MiB"),
        ({"schedule": "dear"}, "schedule dear with groups of", "not tuned: schedule dear with groups of"),
        ({"schedule": "allreduce"}, "schedule='allreduce'", "schedule='allreduce'"),
    ],
    ids=str,
)
def test_tuning_progress_says_what_is_so(on_ranks, options, attached, first_plan) -> None:
    for shown in on_ranks(_shown, 2, options):
        before = shown["attached"][1]
        assert attached in before
        assert before.startswith("schedule=" if "allreduce" in before[:20] else "waiting until DDP's buckets")
        assert first_plan in shown["first plan"][1]


def _on_one_rank() -> list[str]:
    run = Run(Case(model=DeepNet, steps=2, strict=False, dear={"fusion_mb": None}), with_dear=True)
    run.attach()
    shown = [repr(run.state)]
    for x, y in run.batches():
        train_step(run, x, y)
    return [*shown, repr(run.state)]


def test_on_one_rank_a_state_says_that_there_is_nothing_to_do(on_ranks) -> None:
    [(before, after)] = on_ranks(_on_one_rank, 1)
    assert "there is one rank, so nothing is sent" in before and "are tried" not in before
    assert "DDP trains as it was before attach: there is one rank" in after and "last step" not in after


def _switched_off() -> str:
    with mock.patch.dict(os.environ, {"DDP_CROSSOVER": "off"}):
        ddp = DistributedDataParallel(DeepNet())
        return repr(dx.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)))


def test_a_state_says_that_the_environment_has_switched_it_off(on_ranks) -> None:
    [shown] = on_ranks(_switched_off, 1)
    assert shown.splitlines()[1] == "  DDP_CROSSOVER=off in the environment: the model trains as plain DDP does"


def test_times_that_no_leg_has_shown_are_not_measured() -> None:
    log = StepLog()
    for _ in range(2):
        log.note(CommSums(0.0, 0.0, 0.0, 0.0), 0, Counter(), is_pipelined=True, was_looked_at=False)
    stats = DearStats(2, 2, 0, 1, {}, 0, 1.0, math.nan, math.nan, 0, {}, log.figures())
    shown = summary("a model", None, "tuned", stats, is_detached=False)
    assert re.search(r"last step \S+ ms, exposed communication not measured", shown)
    assert math.isnan(stats.flat()["ddp_crossover/exposed_s"])


def test_a_prediction_stands_beside_no_figure_of_steps_before_it() -> None:
    log = StepLog()
    for waited_s in (0.0, 1.0):
        log.note(CommSums(1.0 + waited_s, waited_s, 0.0, 0.0), 0, Counter(), is_pipelined=False, was_looked_at=False)
    stats = DearStats(2, 0, 0, 0, {}, 0, 1.0, 2.0, 1.0, 0, {}, log.figures())
    left = "not tuned: DDP as it was: the measured link is so fast that this should leave under 1% of a step exposed"
    assert "ms of it exposed" in summary("a model", None, left, stats, is_detached=False)
    assert summary("a model", None, left, stats, is_detached=True).splitlines()[1:] == [
        f"  {left}",
        "  no steps hid their all-gathers; 2 were plain all-reduces",
    ]


def _figures() -> list[dict[str, float]]:
    run = Run(Case(model=DeepNet, steps=STEPS), with_dear=True)
    run.attach()
    seen = [run.state.stats().flat()]
    for x, y in run.batches():
        train_step(run, x, y)
        seen.append(run.state.stats().flat())
    prometheus = run.state.stats().flat("ddp_crossover_")
    run.detach()
    return [*seen, prometheus]


def test_flat_figures_are_floats_under_the_same_names_in_each_step(on_ranks) -> None:
    for *seen, prometheus in on_ranks(_figures, 2):
        first, last = seen[0], seen[-1]
        assert all(figures.keys() == first.keys() for figures in seen)
        assert all(type(value) is float for figures in seen for value in figures.values())
        assert math.isnan(first["ddp_crossover/step_s"]) and first["ddp_crossover/steps_total"] == 0
        assert last["ddp_crossover/steps_total"] == STEPS
        assert last["ddp_crossover/step_s"] > 0 and last["ddp_crossover/exposed_s"] >= 0
        assert last["ddp_crossover/sent_bytes_total"] > last["ddp_crossover/sent_bytes"] > 0
        assert all(PROMETHEUS.fullmatch(name) for name in prometheus)
        assert [name.removeprefix("ddp_crossover_") for name in prometheus] == [
            name.removeprefix("ddp_crossover/") for name in last
        ]
