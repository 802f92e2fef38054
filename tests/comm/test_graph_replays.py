"""CUDA graphs that are made after attach: a replay reads parameters by their addresses, where no cover is in the way.

Without CUDA: what a replay would compute is computed from memory at the address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from fake_streams import fake_gpu

WIDTH = 5
STEPS = 10


def _memory_of(parameter: Tensor) -> Tensor:
    """What is at the address that the parameter has now, which nothing else refers to."""
    values = (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())
    return torch.frombuffer(values, dtype=torch.float32).view(parameter.shape)


class Replay(torch.autograd.Function):
    """As `torch.cuda.make_graphed_callables` makes: parameters are inputs, and no operator is called on them."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ memory.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        [x] = ctx.saved_tensors
        return None, None, grad.T @ x


class Graphed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self._memory: Tensor | None = None

    def make_graph(self) -> None:
        self._memory = _memory_of(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self._memory is None:
            return self.last(x @ self.weight.T)
        return self.last(Replay.apply(self._memory, x, self.weight))


def _train(make_at: int, attach: bool, before_replay: Callable[[Any], None]) -> Tensor:
    torch.manual_seed(0)
    model = Graphed()
    # Several buckets: the plan is made with the first one, and the gradient of the graph's weight comes with the last.
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = dx.attach(ddp, optimizer, fusion_mb=1e-4) if attach else None
    for step in range(STEPS):
        if step == make_at:
            if state is not None:
                state.synchronize()
            model.make_graph()
        if state is not None and step > make_at:
            before_replay(state)
        optimizer.zero_grad()
        ddp(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    if state is not None:
        state.detach()
    return model.weight.detach().clone()


def replays(make_at: int, synchronizes: bool) -> str:
    """What becomes of a training with a graph: the weights of plain DDP, or an error."""
    expected = _train(make_at, False, lambda state: None)
    with fake_gpu():
        try:
            found = _train(make_at, True, lambda state: state.synchronize() if synchronizes else None)
        except dx.StaleParameterError as error:
            return str(error)
    return "exact" if torch.equal(found, expected) else "wrong"


@pytest.mark.parametrize(("make_at", "synchronizes"), [(0, False), (7, True)])
def test_a_graph_from_before_the_first_plan_is_exact_or_one_after_synchronize(on_ranks, make_at, synchronizes) -> None:
    assert on_ranks(replays, 1, make_at, synchronizes) == ["exact"]


def test_a_graph_made_later_is_an_error_that_names_the_parameter(on_ranks) -> None:
    [outcome] = on_ranks(replays, 1, 7, False)
    assert "used weight in code that bypasses" in outcome
    assert "state.synchronize()" in outcome


@pytest.mark.parametrize("make_at", [2, 4, 6])
def test_no_replay_is_wrong_in_silence(on_ranks, make_at) -> None:
    assert on_ranks(replays, 1, make_at, False) != ["wrong"]


class SometimesBiased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.gain = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, has_bias: bool) -> Tensor:
        return (x + self.bias if has_bias else x) + self.gain


def two_forwards_and_a_step_between() -> str:
    """The last backward goes through two forwards; the bias, which is pending in the second, is used in the first."""

    def train(attached: bool) -> list[Tensor]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(SometimesBiased())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        state = dx.attach(ddp, optimizer, fusion_mb=1.0) if attached else None
        for step in range(STEPS):
            first = ddp(torch.randn(4, WIDTH), True)
            if step < STEPS - 3:
                optimizer.zero_grad()
                first.square().mean().backward()
                if step < STEPS - 4:
                    optimizer.step()
                continue
            optimizer.step()
            second = ddp(torch.randn(4, WIDTH), False)
            optimizer.zero_grad()
            (first + second).sum().backward()
        optimizer.step()
        found = [parameter.detach().clone() for parameter in ddp.module.parameters()]
        if state is not None:
            state.detach()
        return found

    expected = train(False)
    with fake_gpu():
        try:
            found = train(True)
        except RuntimeError as error:
            return str(error)
    return "exact" if all(map(torch.equal, expected, found)) else "wrong"


def test_a_gradient_of_an_earlier_forward_is_no_replay(on_ranks) -> None:
    assert on_ranks(two_forwards_and_a_step_between, 1) == ["exact"]
