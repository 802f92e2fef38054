"""What is measured in training: order and proportions of layers that sleep, whatever the link does meanwhile."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.comm.gloo_leg import GlooLeg
from ddp_crossover.plan.compute_profiler import ComputeProfiler, Stopwatch
from ddp_crossover.plan.cost_model import ComputeProfile

# So long that what a busy machine adds between them is little beside the shortest; what it adds to a sleep is measured.
FORWARD_S = (0.02, 0.06, 0.02)
BACKWARD_S = (0.05, 0.02, 0.08)
REST_S = 0.04
WAIT_S = 0.02
LOOSE = 0.3  # relative
BETWEEN_S = 0.01  # what is computed beside a sleep


class Naps:
    """Sleeps of one length, and how long they really took: on a busy machine, longer."""

    def __init__(self, planned_s: float) -> None:
        self.planned_s = planned_s
        self.taken_s: list[float] = []

    def take(self) -> None:
        start_s = time.perf_counter()
        time.sleep(self.planned_s)
        self.taken_s.append(time.perf_counter() - start_s)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, naps: Naps) -> torch.Tensor:
        ctx.naps = naps
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.naps.take()
        return gradient, None


class SleepingLayer(nn.Linear):
    """Uses its weight, then sleeps; in backward it sleeps, then has the weight's gradient."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__(600, 600, bias=False)  # more than 1 MiB: a DDP bucket of its own
        self.forward_naps, self.backward_naps = Naps(forward_s), Naps(backward_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.forward_naps.take()
        return _Sleep.apply(y, self.backward_naps)


class Measured(NamedTuple):
    """What was measured on a rank, and how long its naps took: forward, backward, the rest of a step."""

    compute: ComputeProfile
    naps: list[Naps]


def _measured() -> Measured:
    torch.manual_seed(0)
    layers = [SleepingLayer(*times_s) for times_s in zip(FORWARD_S, BACKWARD_S, strict=True)]
    rest = Naps(REST_S)
    ddp = DistributedDataParallel(nn.Sequential(*layers))
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
            rest.take()
    profile = state.profile()
    state.detach()
    assert profile is not None
    naps = [*(layer.forward_naps for layer in layers), *(layer.backward_naps for layer in layers), rest]
    return Measured(profile.compute, naps)


@pytest.mark.alone
def test_layers_are_measured_in_order_and_in_proportion_and_waits_are_left_out(on_ranks) -> None:
    ranks = on_ranks(_measured, 2)
    compute = ranks[0].compute
    assert compute.use_s[0] < compute.use_s[1] < compute.use_s[2] < compute.forward_s
    assert compute.arrival_s[2] < compute.arrival_s[1] < compute.arrival_s[0] <= compute.backward_s
    uses_s = [after - before for before, after in pairwise([*compute.use_s, compute.forward_s])]
    last_first = [0.0, *reversed(compute.arrival_s)]
    arrivals_s = [after - before for before, after in pairwise(last_first)]
    for measured_s, *naps in zip(
        [*uses_s, *reversed(arrivals_s), compute.rest_s], *(rank.naps for rank in ranks), strict=True
    ):
        taken_s = [taken_s for one in naps for taken_s in one.taken_s]
        assert (1 - LOOSE) * min(taken_s) <= measured_s <= (1 + LOOSE) * max(taken_s) + BETWEEN_S
    assert max(uses_s) == uses_s[1] and max(arrivals_s) == arrivals_s[0]


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


FIRST, SECOND = torch.zeros(1), torch.zeros(1)
INDEX_OF = {id(FIRST): 0, id(SECOND): 1}
MODEL: Any = None  # no matter which


def _step(profiler: ComputeProfiler, clock: _Clock, slowness: float = 1.0) -> None:
    """Two parameters, the second of which no module shows and no backward reaches."""
    profiler.forward_begins(MODEL)
    clock.now_s += 1 * slowness
    clock.wait(100)
    profiler.used([0])
    clock.now_s += 2 * slowness
    profiler.used([0])  # once more: not the first use
    profiler.forward_ends(MODEL, None, lambda _: None)
    clock.now_s += 3 * slowness
    profiler.bucket_arrives([FIRST], is_first=True)
    clock.now_s += 4 * slowness
    profiler.backward_ends()
    clock.wait(100)
    clock.now_s += 5 * slowness


def test_the_stopwatch_stands_still_in_waits_and_one_odd_step_changes_nothing() -> None:
    clock = _Clock()
    profiler = ComputeProfiler(clock, INDEX_OF)
    steps = 0
    while not profiler.done:
        _step(profiler, clock, slowness=50.0 if steps in (0, 2) else 1.0)
        steps += 1
        assert steps < 20
    # Slow are the warm-up, and one of four.
    assert profiler.profile() == ComputeProfile((1.0, 0.0), (3.0, 7.0), 3.0, 7.0, 5.0)


def test_a_forward_without_backward_ends_no_step() -> None:
    clock = _Clock()
    profiler = ComputeProfiler(clock, INDEX_OF)
    for _ in range(20):
        profiler.forward_begins(MODEL)
        profiler.forward_ends(MODEL, None, lambda _: None)
    assert not profiler.done
