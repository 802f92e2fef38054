"""Legs overlap compute as the plan says, and the host waits for nothing: the NCCL link on a GPU with a virtual clock.

Two real ranks train over gloo. Layers and legs take virtual time, layers each time a little more or less than the
planner has seen. The real calls decide what runs when.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.fusion import Schedule
from ddp_crossover.plan.search import predict_step
from fake_streams import Wire, fake_gpu
from matrix import often
from timed_models import SHAPES, timed_model

PER_LEG_S = 3e-4
LAUNCH_S = 2e-6
NOISE = 0.05
MEASURED_STEPS = 12


class Seen(NamedTuple):
    """One training.

    Attributes:
        step_s: mean virtual time of a step.
        predicted_s: that of the plan in force, by the simulator.
        compute_s: of a step without communication, without noise.
        legs_s: of all legs of a step, one after the other.
        groups: of the plan.
        host_waits: in the measured steps, by kind.
        ahead: how many steps the host was ahead of the device in the end.
    """

    step_s: float
    predicted_s: float
    compute_s: float
    legs_s: float
    groups: int
    host_waits: dict[str, int]
    ahead: float


def train(shape: str, ratio: float, clip: bool = False) -> Seen:
    sizes = SHAPES[shape]()
    compute_s = sum(size.forward_s + size.backward_s for size in sizes)
    model_bytes = 4 * sum(size.numel for size in sizes)
    # Two legs, each of half of the bytes on two ranks.
    wire = Wire(PER_LEG_S, ratio * compute_s / model_bytes)
    rank = dist.get_rank()
    with fake_gpu(wire=wire, launch_s=LAUNCH_S, gather_writes=not clip) as gpu:
        ddp = DistributedDataParallel(timed_model(gpu, sizes, NOISE, rank), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        state = dx.attach(ddp, optimizer, tune=False)

        def step() -> None:
            optimizer.zero_grad()
            ddp(torch.ones(4)).sum().backward()
            if clip:
                state.clip_grad_norm_(1.0)
            optimizer.step()

        while not state._planning.settled:
            step()
        for _ in range(3):
            step()
        gpu.host_waits.clear()
        begin_s = gpu.main.done.s
        for _ in range(MEASURED_STEPS):
            step()
        host_waits = dict(gpu.host_waits)
        ended_s = gpu.main.done.s
        step_s = (ended_s - begin_s) / MEASURED_STEPS
        planning = state._planning
        predicted = predict_step(state.plan, planning.specs, planning.compute, planning.link_model, Schedule.AUTO)
        groups = len(state.plan.groups)
        ahead = (ended_s - gpu.hosts.now_s) / step_s
        assert state.stats().deferred_steps >= MEASURED_STEPS
        state.detach()
    legs_s = ratio * compute_s + 2 * groups * PER_LEG_S
    return Seen(step_s, predicted.step_s, compute_s, legs_s, groups, host_waits, ahead)


ALIKE = [(shape, 1.0) for shape in SHAPES]


@pytest.mark.parametrize(("shape", "ratio"), often([*ALIKE, ("uniform", 0.8), ("heavy_ends", 2.0)], *ALIKE))
def test_a_step_takes_what_the_simulator_says(on_ranks, shape, ratio) -> None:
    for seen in on_ranks(train, 2, shape, ratio):
        assert seen.groups > 2
        assert seen.step_s == pytest.approx(seen.predicted_s, rel=0.05)
        assert max(seen.compute_s, ratio * seen.compute_s) * 0.97 < seen.step_s
        # One after the other they would take longer by far.
        assert seen.step_s < 0.85 * (seen.compute_s + seen.legs_s)
        assert seen.host_waits == {}
        assert seen.ahead > 1, "the host is not ahead of the device, so it has waited"


def test_own_clipping_makes_the_host_wait_no_more(on_ranks) -> None:
    for seen in on_ranks(train, 2, "uniform", 1.0, True):
        assert seen.host_waits == {}
        assert seen.ahead > 1
