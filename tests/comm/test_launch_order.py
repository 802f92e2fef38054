"""Where all ranks need one order of legs, it is the plan's: the NCCL link, on fake streams and over gloo."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from ddp_crossover.dear import Pipeline
from ddp_crossover.fusion import FusionPlan
from ddp_crossover.nccl.nccl_link import NcclLink
from equivalence import SGD, Case, Run, plain_loop, snapshot
from fake_streams import fake_gpu
from models import DeepNet
from plans import random_plans

Legs = list[tuple[str, int]]

pytestmark = pytest.mark.quick


def launched(seed: int | None) -> tuple[list[tuple[FusionPlan, Legs]], dict[str, torch.Tensor]]:
    """Per iteration of the pipeline its plan and its legs as they were launched; the parameters in the end.

    `seed=None`: plain DDP, for the parameters.
    """
    iterations: list[tuple[FusionPlan, Legs]] = []
    begin = Pipeline.begin_backward

    def note_begin(pipeline: Pipeline, *, same_buckets: bool) -> None:
        iterations.append((pipeline.plan, []))
        begin(pipeline, same_buckets=same_buckets)

    def noting(kind: str, name: str) -> Any:
        call = getattr(NcclLink, name)

        def note(link: NcclLink, what: Any, *args: Any) -> Any:
            if iterations:  # else it is the first use of the groups, at attach
                iterations[-1][1].append((kind, getattr(what, "group", what)))
            return call(link, what, *args)

        return mock.patch.object(NcclLink, name, note)

    with ExitStack() as stack:
        if seed is not None:
            stack.enter_context(fake_gpu())
            stack.enter_context(random_plans(seed, schedules=("auto",)))
            stack.enter_context(mock.patch.object(Pipeline, "begin_backward", note_begin))
            for kind, name in (
                ("scatter", "reduce_scatter"),
                ("gather", "all_gather"),
                ("all_reduce", "all_reduce_leg"),
            ):
                stack.enter_context(noting(kind, name))
        run = Run(Case(model=DeepNet, optimizer=SGD, steps=16, strict=False), with_dear=seed is not None)
        for _ in plain_loop(run):
            pass
        parameters = snapshot(run.model.module.state_dict())
        run.detach()
    return iterations, parameters


def _expected(plan: FusionPlan) -> Legs:
    """What the plan says until the last group has left; then the gather legs that are left, in use order."""
    last = max(place for place, (kind, _) in enumerate(plan.launch_order) if kind != "gather")
    order = list(plan.launch_order[: last + 1])
    split = {group.index for group in plan.groups if group.split}
    return order + [("gather", group) for group in plan.use_order if group in split and ("gather", group) not in order]


@pytest.mark.parametrize(("world_size", "seed"), [(1, 0), (2, 1), (2, 2)])
def test_legs_leave_in_the_plans_order_on_all_ranks(on_ranks, world_size, seed) -> None:
    ranks = on_ranks(launched, world_size, seed)
    plain = on_ranks(launched, world_size, None)
    for (iterations, parameters), (_, expected) in zip(ranks, plain, strict=True):
        assert len(iterations) > 8
        for plan, legs in iterations:
            assert legs == _expected(plan)
        kinds = {kind for _, legs in iterations for kind, _ in legs}
        assert kinds == {"scatter", "gather", "all_reduce"}
        # Some gather legs do leave between scatter legs.
        assert any(
            legs.index(("gather", g)) < len(plan.groups) - 1
            for plan, legs in iterations
            for k, g in legs
            if k == "gather"
        )
        for name, value in expected.items():
            assert torch.equal(parameters[name], value), name
    assert all([legs for _, legs in iterations] == [legs for _, legs in ranks[0][0]] for iterations, _ in ranks)
