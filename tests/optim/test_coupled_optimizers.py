"""Optimizers that update parameters together are not refused: they step as usual, and `stats()`
says why.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

from equivalence import Case, assert_same, optimizer, run_arm


class GlobalNormSGD(Optimizer):
    """Divides by the norm of *all* gradients, as LAMB-like optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


class CountingSGD(SGD):
    """Keeps a counter in its param groups, as schedule-free optimizers do: one per step, not per
    group.
    """

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)


def _fallbacks_of(case: Case) -> dict[str, int]:
    expected, expected_state, _ = run_arm(case, with_dear=False)
    seen, seen_state, stats = run_arm(case, with_dear=True)
    assert_same(seen, expected, "losses")
    assert_same(seen_state, expected_state, "at the end")
    return dict(stats.fallbacks)


@pytest.mark.parametrize("cls", [GlobalNormSGD, CountingSGD])
def test_a_coupled_optimizer_steps_as_usual_and_is_named(on_ranks, cls) -> None:
    case = Case(optimizer=optimizer(cls, lr=0.1))
    for fallbacks in on_ranks(_fallbacks_of, case.world_size, case):
        assert any(cls.__name__ in reason for reason in fallbacks), fallbacks
