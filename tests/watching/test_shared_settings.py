"""What an optimizer keeps for all parameters, and changes in its steps, is what plain DDP makes of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_crossover.watching.caches import caches_among, why_updates_may_differ
from ddp_crossover.watching.known_optimizers import KnownOptimizers
from ddp_crossover.watching.separability import judge
from equivalence import Case, Run, check_case
from models import DeepNet
from own_optimizers import (
    BeginsForAll,
    CountsInAttribute,
    CountsInObject,
    CountsInState,
    HasObject,
    LooksUp,
    OwnOptimizer,
)


def _steps(run: Run) -> Iterator[Any]:
    """Settings change after `step()`, before an update is applied; and what the optimizer keeps is looked at."""
    optimizer: Any = run.optimizer
    for number, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        optimizer.step()
        for settings in [*optimizer.param_groups, *([vars(optimizer.rates)] if hasattr(optimizer, "rates") else [])]:
            settings["lr"] *= 0.9
        if number == 4 and hasattr(optimizer, "steps"):
            optimizer.steps = 1
        copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        yield loss, [(each.defaults, each.state_dict()) for each in copies]
    yield optimizer.state.get("k"), {name: vars(optimizer).get(name) for name in ("steps", "has_begun")}
    yield optimizer.param_groups[0].get("table"), optimizer.defaults.get("table")


@pytest.mark.parametrize("kind", [CountsInState, CountsInAttribute, BeginsForAll, CountsInObject, LooksUp, HasObject])
def test_it_has_the_bits_of_plain_ddp_and_overlaps(on_ranks, kind: Callable[[Any], Optimizer]) -> None:
    check_case(Case(_steps, DeepNet, partial(_made, kind)), on_ranks)


def _made(kind: Callable[[Any], Optimizer], model: nn.Module) -> Optimizer:
    return kind(list(model.parameters()))


def test_updates_of_parameters_with_other_counts_wait() -> None:
    optimizer = LooksUp([nn.Parameter(torch.ones(3)) for _ in range(5)])
    first, *others = parameters = optimizer.param_groups[0]["params"]
    verdict = judge(optimizer)
    caches = caches_among(optimizer, verdict.counters)
    assert (verdict.why_not, caches) == (None, {"table"})

    def step(*trained: Tensor) -> str | None:
        for p in parameters:
            p.grad = torch.ones_like(p) if any(p is each for each in trained) else None
        reason = why_updates_may_differ(optimizer, caches)
        optimizer.step()
        return reason

    assert step(first, *others) is None
    assert step(first) is None
    assert "not all parameters were updated equally often" in (step(first, *others) or "")
    assert step(*others) is None
    assert step(first, *others) is None


def test_groups_that_share_one_wait() -> None:
    optimizer = LooksUp([{"params": [nn.Parameter(torch.ones(3)) for _ in range(5)]} for _ in range(2)])
    assert "'table', which another setting or param group shares" in (judge(optimizer).why_not or "")


def test_what_became_long_waits() -> None:
    optimizer = LooksUp([nn.Parameter(torch.ones(3))])
    assert why_updates_may_differ(optimizer, {"table"}) is None
    optimizer.param_groups[0]["table"] *= 400
    assert "more than 1000 entries" in (why_updates_may_differ(optimizer, {"table"}) or "")


class _Keeps(OwnOptimizer):
    """Keeps the largest gradient of all in its state."""

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        state: dict[Any, Any] = self.state
        for p in parameters:
            state["largest"] = torch.maximum(p.grad.max(), state.get("largest", torch.zeros(())))
            p.add_(p.grad, alpha=-group["lr"])


def test_data_that_is_kept_for_all_is_no_count() -> None:
    assert "under 'largest', with data of a parameter" in (judge(_Keeps([nn.Parameter(torch.ones(3))])).why_not or "")


def test_a_handle_in_an_attribute_is_a_reason_to_wait_and_no_error() -> None:
    optimizer: Any = OwnOptimizer([nn.Parameter(torch.ones(3))])
    optimizer.handle = optimizer.register_step_post_hook(lambda *_: None)
    known = KnownOptimizers([optimizer], str)
    assert "attribute .handle may hold parameters" in (known.why_not(optimizer) or "")
    hash(known.settings(optimizer))
