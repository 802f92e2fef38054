"""Gradients that no reduction has written: plain DDP's result, or an error that names the parameter.

Plain DDP's ranks go apart, each by its own gradient. So does an attached model, unless it would make other numbers of
it: with a sharded optimizer, or weighted.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ddp_crossover as dx
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
    stepped_in_hook,
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
    stepped_in_hook: ["usual"],  # views show what plain DDP has divided already, and leaves to a communication hook
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
        (stepped_in_hook, 0, "usual", "which were not reduced and so not weighted"),
        (stepped_in_hook, IN_PIPELINE, "views", "which were not reduced and so not weighted"),
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


class _ClimbsFirst(torch.optim.SGD):
    """Calls its closure where this rank's own gradients lead uphill, as sharpness-aware steps do with each batch."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        [group] = self.param_groups
        uphill = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in group["params"]]
        for p, up in zip(group["params"], uphill, strict=True):
            p.add_(up)
        with torch.enable_grad():
            closure()
        for p, up in zip(group["params"], uphill, strict=True):
            p.sub_(up).sub_(group["lr"] * p.grad)


def _climbs(weighted: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = _ClimbsFirst(net.parameters(), lr=0.1)
    state = dx.attach(ddp, optimizer, weighted=True) if weighted else None
    for _ in range(3):
        x = torch.randn(4, 4) + dist.get_rank()
        optimizer.zero_grad()
        with ddp.no_sync():
            net(x).square().mean().backward()

        def closure(x: Tensor = x) -> None:
            optimizer.zero_grad()
            with contextlib.nullcontext() if state is None else state.batch(len(x)):
                ddp(x).square().mean().backward()

        optimizer.step(closure)
    if state is not None:
        state.detach()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _climb_alike() -> None:
    for ours, plain in zip(_climbs(True), _climbs(False), strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_step_may_look_at_them_before_its_closure_makes_weighted_ones(on_ranks) -> None:
    on_ranks(_climb_alike, 2)
