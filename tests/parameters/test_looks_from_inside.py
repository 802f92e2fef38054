"""Torch looks at parameters from inside, to compile, export, transform or copy them, while gradients are pending."""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize("place", ["before step", "after step"])
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["exact", "sharded"])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_torch_sees_is_what_it_sees_with_plain_ddp(on_ranks, look, options, place) -> None:
    on_ranks(_compare, 2, options, False, look, place)
