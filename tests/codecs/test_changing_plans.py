"""Plans that change while codes have left something out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddp_crossover as dx
from coded_runs import ADAM, Coded, Training, assert_same, everywhere, loss_of
from ddp_crossover.ddp.reducer import Reducer
from ddp_crossover.fusion import plan_fusion

OnRanks = Callable[..., list[Any]]
INT8: dict[str, Any] = {"wire_dtype": torch.int8}
SPARSE: dict[str, Any] = {"compress": dx.TopK(0.05)}
SIZES_KB = (8, 3, 40, 8, 5)


def _plans_change(case: Coded) -> None:
    """Another plan every two steps, as the tuner makes them, also while a step's gradients are under way."""
    world_size = dist.get_world_size()
    run = Training(case)
    reference = run.reference()
    reducer: Reducer = run.state._reducer
    choose = reducer._in_force.choose
    seen = set()

    def changing() -> None:
        choose()
        if reducer.pipeline is not None and step % 2:
            specs = reducer.pipeline.plan.gradients
            order = list(range(len(specs)))
            order = order[step % len(order) :] + order[: step % len(order)]
            kb = SIZES_KB[step // 2 % len(SIZES_KB)]
            plan = plan_fusion(specs, order, order, world_size=world_size, fusion_mb=kb / 1024)
            reducer._in_force._use(reducer._planning._checked(plan))

    reducer._in_force.choose = changing
    for step in range(16):
        run.step(step)
        seen.add(None if run.state.plan is None else len(run.state.plan.groups))
        reference.step([partial(loss_of, step, one) for one in range(world_size)], run.state.plan)
        if case.looks:
            assert_same(
                run.parameters(), {n: p.detach() for n, p in reference.model.named_parameters()}, f"step {step}"
            )
    assert len(seen) > 3
    assert_same(run.parameters(), {n: p.detach() for n, p in reference.model.named_parameters()}, "at the end")
    for rank, left_out in enumerate(everywhere(run.left_out())):
        assert_same(left_out["residual"], reference.ranks.residual[rank], f"residual of rank {rank}")
    run.state.detach()


CASES = {
    "int8": Coded(INT8, ADAM),
    "sparse": Coded(SPARSE | INT8, ADAM, looks=False),
}


@pytest.mark.parametrize("name", CASES)
def test_residuals_move_with_their_parameters(on_ranks: OnRanks, name: str) -> None:
    on_ranks(_plans_change, 2, CASES[name])


NODES = ((0, 1), (2, 3))
CASES_BY_NODE = {
    "int8": Coded(INT8 | {"groups": "node"}, ADAM, nodes=NODES),
    "sparse": Coded(SPARSE | {"groups": "node"}, ADAM, nodes=NODES),
}


@pytest.mark.parametrize("name", CASES_BY_NODE)
def test_residuals_follow_slices_to_other_ranks_of_a_node(on_ranks: OnRanks, name: str) -> None:
    on_ranks(_plans_change, 4, CASES_BY_NODE[name])


def _tuner(options: dict[str, Any]) -> None:
    run = Training(Coded(options | {"fusion_mb": None}, ADAM))
    reference = run.reference()
    plans: list[Any] = []
    for step in range(120):
        run.backward(step)
        plans.append(run.state.plan)
        run.optimizer.step()
        reference.step([partial(loss_of, step, one) for one in range(2)], run.state.plan)
    assert_same(run.parameters(), {n: p.detach() for n, p in reference.model.named_parameters()}, "at the end")
    assert not run.state.tuning
    assert len({plan and plan.fusion_mb for plan in plans}) > 2


def test_the_tuner_loses_nothing(on_ranks: OnRanks) -> None:
    on_ranks(_tuner, 2, INT8)
