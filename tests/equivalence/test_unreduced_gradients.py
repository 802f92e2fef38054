"""Gradients that no reduction has written: plain DDP's result, or an error that names the parameter.

Plain DDP's ranks go apart, each by its own gradient. So does an attached model, unless it would make other numbers of
it: with a sharded optimizer, or weighted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import ddp_crossover as dx
from equivalence import SMALL_GROUPS_MB

STEPS = 10
IN_PIPELINE = 7
WIDTH = 6


class Script:
    """Trains a small model; some of its steps have gradients that DDP does not reduce."""

    def __init__(self, ddp: dict[str, Any], dear: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.model = DistributedDataParallel(self.net, **ddp)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.state = None
        if dear is not None:
            self.state = dx.attach(self.model, self.optimizer, fusion_mb=SMALL_GROUPS_MB, **dear)
        self.weighs = bool(dear and dear.get("weighted"))

    def x(self, step: int) -> Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))

    def batch(self) -> contextlib.AbstractContextManager[Any]:
        return self.state.batch(4) if self.state is not None and self.weighs else contextlib.nullcontext()

    def backward(self, step: int) -> None:
        with self.batch():
            self.model(self.x(step)).pow(2).mean().backward()


def gradient_penalty(script: Script, step: int) -> None:
    """Two backwards of one forward, of which DDP reduces one."""
    x = script.x(step).requires_grad_()
    with script.batch():
        output = script.model(x)
        output.pow(2).mean().backward(retain_graph=True)
        [gradient] = torch.autograd.grad(output.sum(), x, create_graph=True)
        gradient.pow(2).mean().backward()


def penalty_alone(script: Script, step: int) -> None:
    """The gradients that DDP has reduced are dropped, and those of the second backward are in new tensors."""
    output = script.model(script.x(step))
    output.pow(2).mean().backward(retain_graph=True)
    script.optimizer.zero_grad()
    output.abs().mean().backward()


def never_synchronized(script: Script, step: int) -> None:
    with script.model.no_sync():
        script.backward(step)


def past_ddp(script: Script, step: int) -> None:
    script.net(script.x(step)).pow(2).mean().backward()


class _Negative(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return -weight


def parametrized(script: Script, step: int) -> None:
    """DDP has its hook on an accumulator of gradients that the parameter no longer has."""
    if not parametrize.is_parametrized(script.net[0]):
        parametrize.register_parametrization(script.net[0], "weight", _Negative())
    script.backward(step)


def _train(
    unreduced: Callable[[Script, int], None], first: int, ddp: dict[str, Any], dear: dict[str, Any] | None
) -> list[Tensor]:
    script = Script(ddp, dear)
    for step in range(STEPS):
        script.optimizer.zero_grad()
        if step >= first:
            unreduced(script, step)
        else:
            script.backward(step)
        script.optimizer.step()
    return [parameter.detach().clone() for parameter in script.net.parameters()]


DDP: dict[str, dict[str, Any]] = {
    "usual": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
KINDS = {
    gradient_penalty: ["usual", "views", "static", "unused"],
    penalty_alone: ["usual", "static"],
    never_synchronized: ["usual", "views"],
    past_ddp: ["usual"],
    parametrized: ["unused"],
}
CASES = [(kind, ddp) for kind, settings in KINDS.items() for ddp in settings]
cases = pytest.mark.parametrize(("kind", "ddp"), CASES, ids=[f"{kind.__name__}-{ddp}" for kind, ddp in CASES])


def _as_plain(kind: Callable[[Script, int], None], first: int, ddp: str, dear: dict[str, Any]) -> None:
    for ours, plain in zip(_train(kind, first, DDP[ddp], dear), _train(kind, first, DDP[ddp], None), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.quick
@pytest.mark.parametrize("first", [0, IN_PIPELINE])
@cases
def test_ranks_go_their_own_way_as_with_plain_ddp(on_ranks, kind, ddp, first) -> None:
    on_ranks(_as_plain, 2, kind, first, ddp, {})


def _error(kind: Callable[[Script, int], None], first: int, ddp: str, dear: dict[str, Any]) -> str:
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
        (never_synchronized, 0, "usual", "which were not reduced and so not weighted"),
        (never_synchronized, IN_PIPELINE, "views", "which were not reduced and so not weighted"),
        (gradient_penalty, IN_PIPELINE, "usual", "which were not reduced and so not weighted"),
        (gradient_penalty, IN_PIPELINE, "static", "which were not reduced and so not weighted"),
        (parametrized, 0, "unused", "DDP takes 0.weight for unused"),
        (parametrized, IN_PIPELINE, "unused", "DDP takes 0.weight for unused"),
    ],
)
def test_they_are_never_taken_for_weighted_ones(on_ranks, kind, first, ddp, message) -> None:
    for said in on_ranks(_error, 2, kind, first, ddp, {"weighted": True}):
        assert message in said, said


def _averaged_by_the_script(script: Script, step: int) -> None:
    with script.model.no_sync():
        script.backward(step)
    for parameter in script.net.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad.div_(2))


@pytest.mark.parametrize("first", [0, IN_PIPELINE])
def test_a_script_may_average_gradients_itself(on_ranks, first) -> None:
    on_ranks(_as_plain, 2, _averaged_by_the_script, first, "usual", {"shard_optimizer": True})
