"""Torch looks at parameters from inside, to compile, export, transform or copy them, while gradients are pending."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx

_STEPS = 8
_LOOKS_IN = (4, 6)


class _Branched(nn.Module):
    """Has another graph in each third step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden + self.second(hidden) if step % 3 == 0 else hidden)


def _fake(net: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(parameter) for parameter in net.parameters()]
    return [tuple(fake.grad.shape) for fake in fakes if fake.grad is not None]


def _exported(net: nn.Module, x: Tensor) -> Tensor:
    return torch.export.export(net, (x,)).module()(x)


def _transformed(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    values = {name: parameter.detach() for name, parameter in net.named_parameters()}
    return torch.func.grad(lambda p: torch.func.functional_call(net, p, (x,)).square().mean())(values)


def _copied(net: nn.Module, x: Tensor) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in copy.deepcopy(net).parameters()]


def _saved(net: nn.Module, x: Tensor) -> list[Tensor | None]:
    file = io.BytesIO()
    torch.save([(p, p.grad) for p in net.parameters()], file)
    file.seek(0)
    return [grad for _, grad in torch.load(file, weights_only=False)]


def _nothing(net: nn.Module, x: Tensor) -> None:
    pass


LOOKS = {look.__name__.strip("_"): look for look in (_fake, _exported, _transformed, _copied, _saved)}


def _train(options: dict[str, Any] | None, compiled: bool, look: Callable[[nn.Module, Tensor], Any], place: str) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = _Branched()
    ddp = DistributedDataParallel(net, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if options is not None:
        dx.attach(ddp, optimizer, fusion_mb=1e-4, **options)
    forward: Any = torch.compile(ddp, backend="aot_eager") if compiled else ddp
    seen: list[Any] = []
    for step in range(_STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        forward(x, step).square().mean().backward()
        if place == "before step" and step in _LOOKS_IN:
            seen.append(look(net, x))
        optimizer.step()
        if place == "after step" and step in _LOOKS_IN:
            seen.append(look(net, x))
    return [seen, [parameter.detach().clone() for parameter in net.parameters()]]


def _compare(options: dict[str, Any], compiled: bool, look: Callable[[nn.Module, Tensor], Any], place: str) -> None:
    ours, plain = _train(options, compiled, look, place), _train(None, compiled, look, place)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["exact", "sharded"])
def test_a_new_graph_while_gradients_that_are_never_zeroed_are_pending(on_ranks, options) -> None:
    on_ranks(_compare, 2, options, True, _nothing, "nowhere")


def _compile_on_rank_0_alone(leaves_before_step: bool) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    dx.attach(ddp, optimizer, fusion_mb=1e-4, shard_optimizer=True)
    for step in range(4):
        ddp(torch.ones(4, 8)).sum().backward()
        if not (leaves_before_step and step == 3):
            optimizer.step()
    if dist.get_rank() == 0:
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
    dist.barrier()


@pytest.mark.parametrize("leaves_before_step", [False, True])
def test_one_rank_compiles_something_else_while_gradients_are_spread(on_ranks, leaves_before_step) -> None:
    # As after a model that was dropped without detach(), and that the garbage collector of one rank has not found yet.
    on_ranks(_compile_on_rank_0_alone, 2, leaves_before_step)


@torch.compile(backend="aot_eager")
def _norm(net: nn.Module) -> Tensor:
    return torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None])


@torch.compile(backend="aot_eager")
def _clipped(net: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(net.parameters(), 0.1)


@torch.compile(backend="aot_eager")
def _halved(net: nn.Module) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@pytest.mark.parametrize("place", ["before step", "after step"])
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["exact", "sharded"])
@pytest.mark.parametrize("read", [_norm, _clipped, _halved], ids=["norm", "clip", "scale"])
def test_compiled_code_that_reads_pending_gradients(on_ranks, read, options, place) -> None:
    on_ranks(_compare, 2, options, False, functools.partial(_look, read), place)


def _look(read: Callable[[nn.Module], Any], net: nn.Module, x: Tensor) -> Any:
    return read(net)


@pytest.mark.parametrize("place", ["before step", "after step"])
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["exact", "sharded"])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_torch_sees_is_what_it_sees_with_plain_ddp(on_ranks, look, options, place) -> None:
    on_ranks(_compare, 2, options, False, look, place)
