"""Gradients that a script gives to other parameters, and lets a backward add to, beside one that it holds. Exchanges
alone the fuzzer draws (`gradients_taken`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from heard import heard

WIDTH, STEPS, EXCHANGED_IN = 6, 8, 6

Exchange = Callable[[nn.Parameter, nn.Parameter], None]


def swap(p: nn.Parameter, q: nn.Parameter) -> None:
    p.grad, q.grad = q.grad, p.grad


def one_for_two(p: nn.Parameter, q: nn.Parameter) -> None:
    p.grad = q.grad


def train(exchange: Exchange, bucket_view: bool, attached: bool, holds: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=bucket_view)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = dx.attach(ddp, optimizer, fusion_mb=1.0) if attached else None
    p, q, r = (layer.weight for layer in net)
    seen, held = [], None
    for step in range(STEPS):
        if step == EXCHANGED_IN:
            held = r.grad if holds else None
            exchange(p, q)
        else:
            optimizer.zero_grad()
        ddp(torch.randn(4, WIDTH)).square().mean().backward()
        if held is not None:
            seen, held = [held.clone()], None
        optimizer.step()
    if state is not None:
        state.detach()
    return [*seen, *(parameter.detach().clone() for parameter in net.parameters())]


def compared(exchange: Exchange, bucket_view: bool, holds: bool = False) -> str:
    expected = train(exchange, bucket_view, False, holds)
    try:
        found = train(exchange, bucket_view, True, holds)
    except RuntimeError as error:
        return str(error)
    return "equal" if all(map(torch.equal, expected, found)) else "differs"


def test_another_gradient_that_a_script_holds_is_left_where_it_is(on_ranks) -> None:
    assert on_ranks(compared, 1, swap, True, True) == ["equal"]


def test_one_tensor_as_the_gradient_of_two_parameters_is_exact_or_refused(on_ranks) -> None:
    assert on_ranks(compared, 1, one_for_two, True) == ["equal"]
    [said] = on_ranks(compared, 1, one_for_two, False)
    assert "because a script has given both the same tensor" in said
    assert "p.grad = q.grad.clone()" in said


def links_alive_after_detach(options: dict[str, Any]) -> bool:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with heard():
        state = dx.attach(ddp, optimizer, fusion_mb=1.0, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(4, WIDTH)).square().mean().backward()
        held = net[0].weight.grad
        assert held is not None
        held.sum()
        optimizer.step()
    link = weakref.ref(state._link)
    state.detach()
    del state, ddp, optimizer, net
    gc.collect()
    return link() is not None and held is not None


@pytest.mark.parametrize("options", [{}, {"wire_dtype": torch.bfloat16}], ids=["as they are", "bf16"])
def test_a_gradient_that_a_script_holds_keeps_nothing_else_alive_after_detach(on_ranks, options) -> None:
    assert on_ranks(links_alive_after_detach, 1, options) == [False]


def held_over_a_step(attached: bool, options: dict[str, Any]) -> list[Tensor]:
    """`.grad` is taken between a forward and its backward, which adds to it, and read after the next forward."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = dx.attach(ddp, optimizer, fusion_mb=1.0, **options) if attached else None
    torch.manual_seed(dist.get_rank())
    held, seen = None, []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step != STEPS - 2)
        loss = ddp(torch.randn(4, WIDTH)).square().mean()
        if step == STEPS - 2:
            held = net[0].weight.grad
        elif held is not None:
            seen = [held.clone()]
        loss.backward()
        optimizer.step()
    if state is not None:
        state.detach()
    return [*seen, *(parameter.detach().clone() for parameter in net.parameters())]


def held_is_that_of_plain_ddp(options: dict[str, Any]) -> bool:
    return all(map(torch.equal, held_over_a_step(False, {}), held_over_a_step(True, options)))


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["plain", "sharded"])
def test_a_held_gradient_follows_what_ddp_puts_into_its_bucket(on_ranks, options) -> None:
    assert on_ranks(held_is_that_of_plain_ddp, 2, options) == [True, True]
