"""What codes leave out, in training loops that are not a tutorial's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddp_crossover as dx
from coded_runs import ADAM, SGD, Coded, Training, assert_same, everywhere, loss_of

OnRanks = Callable[..., list[Any]]
INT8: dict[str, Any] = {"wire_dtype": torch.int8}
SPARSE_INT8: dict[str, Any] = {"compress": dx.TopK(0.05)} | INT8
WARM = dx.TopK(0.02, momentum_correction=0.9, warmup=[(6, 0.5), (3, 0.2)])
WIRES = {"int8": INT8, "sparse": SPARSE_INT8, "momentum": {"compress": WARM}}


def residual(run: Training) -> dict[str, Tensor]:
    return run.state.state_dict()["residual"]


# What is not finite.


def _nan_on_one_rank(wire: dict[str, Any], bad: float) -> None:
    rank = dist.get_rank()
    run = Training(Coded(wire))
    reference = run.reference()

    def both(step: int) -> None:
        run.step(step)
        reference.step([partial(loss_of, step, one) for one in range(2)], run.state.plan)
        assert_same(run.parameters(), {n: p.detach() for n, p in reference.model.named_parameters()}, f"step {step}")

    for step in range(6):
        both(step)
    before = copy.deepcopy(run.left_out())
    run.optimizer.zero_grad()
    loss = loss_of(6, rank, run.model)
    (loss * bad if rank == 1 else loss).backward()
    spoilt = [name for name, p in run.model.module.named_parameters() if not p.grad.isfinite().all()]
    assert "middle.weight" in spoilt and "norm.bias" in spoilt
    assert all(names == spoilt for names in everywhere(spoilt))
    after = run.left_out()
    assert after["steps"] == before["steps"]
    for kind in ("residual", "velocity"):
        assert_same(after[kind], before[kind], kind)
    # The script leaves the step out. The next ones are as if it had never been.
    for step in range(7, 10):
        both(step)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("wire", WIRES)
def test_nan_reaches_every_rank_and_goes_again(on_ranks: OnRanks, wire: str, bad: float) -> None:
    on_ranks(_nan_on_one_rank, 2, WIRES[wire], bad)
