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
from ddp_crossover.hook.reducer import Reducer
from ddp_crossover.plan.cutting import plan_fusion
from node_groups import TWO_BY_TWO

OnRanks = Callable[..., list[Any]]
INT8: dict[str, Any] = {"wire_dtype": torch.int8}
SPARSE: dict[str, Any] = {"compress": dx.TopK(0.05)}
BY_NODE = {"groups": "node"}  # residuals follow their slices to other ranks of a node
SIZES_KB = (8, 3, 40, 8, 5)
CASES = {
    "int8": Coded(INT8, ADAM),
    "sparse": Coded(SPARSE | INT8, ADAM, looks=False),
    "int8, by node": Coded(INT8 | BY_NODE, ADAM, nodes=TWO_BY_TWO),
    "sparse, by node": Coded(SPARSE | BY_NODE, ADAM, nodes=TWO_BY_TWO),
}


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
        if (pipeline := reducer._in_force.pipeline) is not None and step % 2:
            specs = pipeline.plan.gradients
            order = list(range(len(specs)))
            order = order[step % len(order) :] + order[: step % len(order)]
            kb = SIZES_KB[step // 2 % len(SIZES_KB)]
            plan = plan_fusion(specs, order, order, world_size=world_size, fusion_mb=kb / 1024)
            reducer._in_force._use(reducer._in_force._planning._checked(plan))

    reducer._in_force.choose = changing
    for step in range(16):
        run.step(step)
        seen.add(None if run.state.plan is None else len(run.state.plan.groups))
        reference.step([partial(loss_of, step, one) for one in range(world_size)], run.state.plan)
        if case.looks:
            assert_same(run.parameters(), reference.parameters(), f"step {step}")
    assert len(seen) > 3
    assert_same(run.parameters(), reference.parameters(), "at the end")
    for rank, left_out in enumerate(everywhere(run.left_out())):
        assert_same(left_out["residual"], reference.ranks.residual[rank], f"residual of rank {rank}")
    run.state.detach()


@pytest.mark.parametrize("name", CASES)
def test_residuals_move_with_their_parameters(on_ranks: OnRanks, name: str) -> None:
    on_ranks(_plans_change, 4 if CASES[name].nodes else 2, CASES[name])


def _tuner() -> None:
    run = Training(Coded(INT8 | {"fusion_mb": None}, ADAM))
    reference = run.reference()
    plans: list[Any] = []
    for step in range(120):
        run.backward(step)
        plans.append(run.state.plan)
        run.optimizer.step()
        reference.step([partial(loss_of, step, one) for one in range(2)], run.state.plan)
    assert_same(run.parameters(), reference.parameters(), "at the end")
    assert not run.state.tuning
    assert len({plan and plan.fusion_mb for plan in plans}) > 2
    # Over loopback, encoding takes longer than sending. Whoever declines says so, and frees the memory of residuals.
    run.backward(120)
    is_coded = run.state.plan is not None and run.state.plan.is_coded
    progress = run.state.tuning_progress()
    assert progress.startswith("tuned: ") and is_coded != ("gradients travel as they are" in progress)
    assert is_coded == ("residual" in run.left_out())


def test_the_tuner_loses_nothing(on_ranks: OnRanks) -> None:
    on_ranks(_tuner, 2)
