"""A model's training takes turns where it computes, and ends them where it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_crossover.addons.lease.sharing.turn_points import TurnPoints

pytestmark = pytest.mark.quick


class Turns:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)

    def seen(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def _points(*, pending: bool = False, deferred: bool = False) -> tuple[Turns, TurnPoints]:
    turns: Any = Turns()
    updates: Any = SimpleNamespace(pending={1} if pending else set(), is_deferred=lambda optimizer: deferred)
    return turns, TurnPoints(turns, updates)


def _model(*, broadcasts: bool = False, reduces: bool = True, training: bool = True) -> Any:
    return SimpleNamespace(
        will_sync_module_buffers=lambda: broadcasts,
        require_backward_grad_sync=reduces,
        module=SimpleNamespace(training=training),
    )


def test_a_turn_begins_with_the_first_bucket_of_a_backward_and_ends_with_the_backward() -> None:
    turns, points = _points()
    points.bucket_arrives([], is_first=True)
    assert turns.seen() == ["want", "resume"]
    points.bucket_arrives([], is_first=False)
    assert turns.seen() == []
    points.backward_ends()
    assert turns.seen() == ["release", "step_ended"]


@pytest.mark.parametrize("broadcasts", [False, True])
@pytest.mark.parametrize("pending", [False, True])
def test_a_turn_begins_with_the_model_behind_a_broadcast_of_buffers(broadcasts: bool, pending: bool) -> None:
    turns, points = _points(pending=pending)
    points.compute_begins()  # not called by DDP
    assert turns.seen() == []
    points.forward_begins(_model(broadcasts=broadcasts))
    assert turns.seen() == ["release" if broadcasts else "want"]
    points.compute_begins()
    assert turns.seen() == (["want"] if pending else ["want", "resume"])


@pytest.mark.parametrize(
    ("model", "output", "grad", "ends"),
    [
        (_model(), 1, True, False),
        (_model(), None, True, True),
        (_model(), 1, False, True),
        (_model(training=False), 1, True, True),
    ],
    ids=["backward follows", "raised", "no grad", "eval"],
)
def test_a_turn_ends_with_a_forward_that_no_backward_follows(model: Any, output: Any, grad: bool, ends: bool) -> None:
    turns, points = _points()
    asked: list[Any] = []
    with torch.set_grad_enabled(grad):
        points.forward_ends(model, output, asked.append)
    assert turns.seen() == (["release"] if ends else []) and not asked


def test_a_turn_ends_with_a_backward_without_synchronization() -> None:
    turns, points = _points()
    asked: list[Any] = []
    points.forward_ends(_model(reduces=False), 1, asked.append)
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: asked[0]())
    x.register_hook(lambda gradient: turns.calls.append("gradient"))
    y.backward()
    assert turns.seen() == ["gradient", "release"]


@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_that_computes_takes_a_turn(deferred: bool) -> None:
    turns, points = _points(deferred=deferred)
    optimizer: Any = None
    points.step_begins(optimizer)
    points.step_ends(optimizer)
    assert turns.seen() == (["release"] if deferred else ["want", "resume", "release"])
