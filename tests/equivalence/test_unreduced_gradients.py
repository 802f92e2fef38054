"""Gradients that no reduction has written: plain DDP's result, or an error that names the parameter.

Plain DDP's ranks go apart, each by its own gradient. So does an attached model, unless it would make other numbers of
it: with a sharded optimizer, or weighted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from unreduced import (
    IN_PIPELINE,
    Script,
    Step,
    alone_on_purpose,
    averaged_after_no_sync,
    parametrized,
    past_ddp,
    second_backward,
    second_backward_alone,
)


def _train(kind: Step, first: int, ddp: dict[str, Any], dear: dict[str, Any] | None) -> list[Tensor]:
    script = Script(dear, ddp)
    script.train(kind, first)
    return [parameter.detach().clone() for parameter in script.net.parameters()]


DDP: dict[str, dict[str, Any]] = {
    "usual": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
KINDS = {
    second_backward: ["usual", "views", "static", "unused"],
    second_backward_alone: ["usual", "static"],
    alone_on_purpose: ["usual", "views"],
    past_ddp: ["usual"],
    parametrized: ["unused"],
}
CASES = [(kind, ddp) for kind, settings in KINDS.items() for ddp in settings]
cases = pytest.mark.parametrize(("kind", "ddp"), CASES, ids=[f"{kind.__name__}-{ddp}" for kind, ddp in CASES])


def _as_plain(kind: Step, first: int, ddp: str, dear: dict[str, Any]) -> None:
    for ours, plain in zip(_train(kind, first, DDP[ddp], dear), _train(kind, first, DDP[ddp], None), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.quick
@pytest.mark.parametrize("first", [0, IN_PIPELINE])
@cases
def test_ranks_go_their_own_way_as_with_plain_ddp(on_ranks, kind, ddp, first) -> None:
    on_ranks(_as_plain, 2, kind, first, ddp, {})


def _error(kind: Step, first: int, ddp: str, dear: dict[str, Any]) -> str:
    try:
        _train(kind, first, DDP[ddp], dear)
    except RuntimeError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("first", [0, IN_PIPELINE])
@cases
def test_shards_are_never_made_of_them(on_ranks, kind, ddp, first) -> None:
    for said in on_ranks(_error, 2, kind, first, ddp, {"shard_optimizer": True}):
        assert "not the same on all ranks" in said and "leave out shard_optimizer" in said, said


@pytest.mark.parametrize(
    ("kind", "first", "ddp", "message"),
    [
        (alone_on_purpose, 0, "usual", "which were not reduced and so not weighted"),
        (alone_on_purpose, IN_PIPELINE, "views", "which were not reduced and so not weighted"),
        (second_backward, IN_PIPELINE, "usual", "which were not reduced and so not weighted"),
        (second_backward, IN_PIPELINE, "static", "which were not reduced and so not weighted"),
        (parametrized, 0, "unused", "DDP takes 0.weight for unused"),
        (parametrized, IN_PIPELINE, "unused", "DDP takes 0.weight for unused"),
    ],
)
def test_they_are_never_taken_for_weighted_ones(on_ranks, kind, first, ddp, message) -> None:
    for said in on_ranks(_error, 2, kind, first, ddp, {"weighted": True}):
        assert message in said, said


@pytest.mark.parametrize("first", [0, IN_PIPELINE])
def test_a_script_may_average_gradients_itself(on_ranks, first) -> None:
    on_ranks(_as_plain, 2, averaged_after_no_sync, first, "usual", {"shard_optimizer": True})
