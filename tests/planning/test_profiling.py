"""What is measured in training: order and proportions of layers that sleep, whatever the link does meanwhile."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.collectives.gloo_leg import GlooLeg
from ddp_crossover.planning.compute_profiler import ComputeProfiler, Stopwatch
from ddp_crossover.planning.cost_model import ComputeProfile

# So long that what a busy machine adds is little beside it, also to the shortest.
FORWARD_S = (0.02, 0.06, 0.02)
BACKWARD_S = (0.05, 0.02, 0.08)
REST_S = 0.04
WAIT_S = 0.02
LOOSE = 0.3  # relative


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.backward_s)
        return gradient, None


class SleepingLayer(nn.Linear):
    """Uses its weight, then sleeps; in backward it sleeps, then has the weight's gradient."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__(600, 600, bias=False)  # more than 1 MiB: a DDP bucket of its own
        self._times_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        time.sleep(self._times_s[0])
        return _Sleep.apply(y, self._times_s[1])


def _measured() -> ComputeProfile:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*map(SleepingLayer, FORWARD_S, BACKWARD_S)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    state = dx.attach(ddp, optimizer, tune=False)
    wait = GlooLeg.wait

    def slow_wait(leg: GlooLeg, host_wait: Any = None) -> None:
        time.sleep(WAIT_S)
        wait(leg, host_wait)

    with mock.patch.object(GlooLeg, "wait", slow_wait):
        while state.tuning:
            optimizer.zero_grad()
            ddp(torch.randn(2, 600)).square().mean().backward()
            state.clip_grad_norm_(1.0)
            optimizer.step()
            time.sleep(REST_S)
    profile = state.profile()
    state.detach()
    assert profile is not None
    return profile.compute


def test_layers_are_measured_in_order_and_in_proportion_and_waits_are_left_out(on_ranks) -> None:
    compute = on_ranks(_measured, 2)[0]
    assert compute.use_s[0] < compute.use_s[1] < compute.use_s[2] < compute.forward_s
    assert compute.arrival_s[2] < compute.arrival_s[1] < compute.arrival_s[0] <= compute.backward_s
    uses_s = [
        after - before for before, after in zip(compute.use_s, [*compute.use_s[1:], compute.forward_s], strict=True)
    ]
    assert uses_s == pytest.approx(FORWARD_S, rel=LOOSE, abs=0.01)
    last_first = [0.0, *reversed(compute.arrival_s)]
    arrivals_s = [after - before for before, after in pairwise(last_first)]
    assert arrivals_s == pytest.approx(BACKWARD_S[::-1], rel=LOOSE, abs=0.01)
    assert compute.rest_s == pytest.approx(REST_S, rel=LOOSE, abs=0.01)


class _Clock(Stopwatch):
    """Time that a test lets pass."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        with self.waiting():
            self.now_s += seconds


def _step(profiler: ComputeProfiler, clock: _Clock, slowness: float = 1.0) -> None:
    """Two parameters, the second of which no module shows and no backward reaches."""
    profiler.forward_begins()
    clock.now_s += 1 * slowness
    clock.wait(100)
    profiler.used([0])
    clock.now_s += 2 * slowness
    profiler.used([0])  # once more: not the first use
    profiler.forward_ends()
    clock.now_s += 3 * slowness
    profiler.arrived([0])
    clock.now_s += 4 * slowness
    profiler.backward_ends()
    clock.wait(100)
    clock.now_s += 5 * slowness


def test_the_stopwatch_stands_still_in_waits_and_one_odd_step_changes_nothing() -> None:
    clock = _Clock()
    profiler = ComputeProfiler(clock, 2)
    steps = 0
    while not profiler.done:
        _step(profiler, clock, slowness=50.0 if steps in (0, 2) else 1.0)
        steps += 1
        assert steps < 20
    # Slow are the warm-up, and one of four.
    assert profiler.profile() == ComputeProfile((1.0, 0.0), (3.0, 7.0), 3.0, 7.0, 5.0)


def test_a_forward_without_backward_ends_no_step() -> None:
    clock = _Clock()
    profiler = ComputeProfiler(clock, 2)
    for _ in range(20):
        profiler.forward_begins()
        profiler.forward_ends()
    assert not profiler.done
