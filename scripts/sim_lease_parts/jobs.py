"""Jobs in virtual time: training whose legs travel over a wire of its own, and a filler; each the real code's client.

Turns, gaps, predictions and breaks are decided by the package; so are a filler's hooks. What is simulated is what they
stand on: kernels, hosts and messages.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ddp_crossover.addons.lease.client.instrument import Instrument, RunAhead
from ddp_crossover.addons.lease.sharing.turns import Turns
from ddp_crossover.comm.stream_order import CudaStreams
from ddp_crossover.compute_waits import NoOtherJobs
from ddp_crossover.nccl.nccl_link import _NcclLeg
from ddp_crossover.report.clock import CommClock
from sim_lease_parts.broker import SimLease
from sim_lease_parts.gpu import Process
from sim_lease_parts.models import Group, Model, groups_of, layers_of
from sim_lease_parts.seam import DEVICE, SimEvent, SimStream, World

FUSION_MB = 8.0
STEPS_AHEAD = 2
# Kernels vary, and so do hosts.
JITTER = 0.05

# The part of the GPU that the kernels of training fill; a filler's large products fill all of it.
WIDTH = 0.13

FILLER_KERNELS, FILLER_KERNEL_S, FILLER_LAUNCH_S = 8, 0.25e-3, 12e-6


class _Alone(NoOtherJobs):
    """The turns of a job without a lease."""

    def want(self) -> None:
        pass

    def step_ended(self) -> None:
        pass


class Job:
    """Steps on a GPU of which some are on their way.

    Args:
        world: where it runs.
        name: of the job.
        lease: with which it takes turns, or None.

    Attributes:
        ended_s: when each step of the GPU ended.
    """

    def __init__(self, world: World, name: str, lease: SimLease | None) -> None:
        self._world = world
        self.name = name
        self.lease = lease
        self.ended_s: list[float] = []
        self._computed_s: list[float] = []
        self._under_way: deque[SimEvent] = deque()

    def computed_in(self, begin_s: float, end_s: float) -> float:
        """The part of the time between two moments in which the GPU has computed for it."""
        inside = [place for place, time_s in enumerate(self.ended_s) if begin_s <= time_s <= end_s]
        first, last = inside[0], inside[-1]
        return (self._computed_s[last] - self._computed_s[first]) / (self.ended_s[last] - self.ended_s[first])

    def _step_queued(self, process: Process, stream: SimStream, ahead: int = STEPS_AHEAD) -> None:
        """The host is so many steps ahead of the GPU at most."""
        self._under_way.append(SimEvent(stream))
        while len(self._under_way) > ahead:
            end = self._under_way.popleft()
            end.synchronize()
            assert end.event.at_s is not None
            self.ended_s.append(end.event.at_s)
            self._computed_s.append(process.computed_s)


class Training(Job):
    """A training job of one rank, whose peers are as fast.

    Args:
        world: where it runs.
        name: of the job.
        model: what is trained.
        all_reduce_s: what all gradients take on the wire.
        lease: with which it takes turns, or None.
        seed: of its jitter.

    Attributes:
        turns: its turns.
    """

    def __init__(
        self, world: World, name: str, model: Model, all_reduce_s: float, lease: SimLease | None, seed: int = 0
    ) -> None:
        super().__init__(world, name, lease)
        self._model = model
        self._groups = groups_of(model, all_reduce_s, FUSION_MB)
        self._layers = layers_of(model)
        self._random = random.Random(f"{name} {seed}")
        self.turns: Any = _Alone()

    def run(self, until_s: float) -> None:
        """Train until then."""
        world, hosts = self._world, self._world.hosts
        process, compute = world.begin_process(WIDTH)
        wire = world.wire(process)
        clock = CommClock()
        if self.lease is not None:
            legs: Any = (wire,)
            self.turns = Turns(self.lease, clock, lambda reason: None, CudaStreams(DEVICE, legs))
        gathers: dict[Group, _NcclLeg] = {}
        link: Any = SimpleNamespace(clock=clock, watch=SimpleNamespace(add=lambda *leg: None))
        while hosts.now_s < until_s:
            self.turns.want()
            self._forward(compute, gathers)
            gathers = self._backward(compute, wire, link)
            self.turns.release()
            self.turns.step_ended()
            hosts.spend(self._model.between_s * self._jitter())
            self._step_queued(process, compute)
        self._step_queued(process, compute, ahead=0)

    def _forward(self, compute: SimStream, gathers: dict[Group, _NcclLeg]) -> None:
        first_uses = {group.first: group for group in gathers}

        def have_arrived() -> bool:
            return all(leg.is_done() for leg in gathers.values())

        for index, layer in enumerate(self._layers):
            group = first_uses.get(index)
            if group is not None:
                with self.turns.gap(index, have_arrived) as host_wait:
                    gathers[group].wait(host_wait)
            self.turns.resume()
            self._launch(compute, layer.compute / 3)

    def _backward(self, compute: SimStream, wire: SimStream, link: Any) -> dict[Group, _NcclLeg]:
        arrives = {group.first: group for group in self._groups}
        for index in reversed(range(len(self._layers))):
            self._launch(compute, self._layers[index].compute * 2 / 3)
            if (group := arrives.get(index)) is not None:
                wire.wait_stream(compute)
                wire.stream.spin(self._leg_s(group))
        gathers: dict[Group, _NcclLeg] = {}
        for group in reversed(self._groups):
            begun: Any = SimEvent(wire)
            wire.stream.spin(self._leg_s(group))
            stream: Any = wire
            gathers[group] = _NcclLeg(link, f"gather leg {group}", group.first, stream, begun)
        return gathers

    def _launch(self, stream: SimStream, part: float) -> None:
        stream.stream.compute(part * self._model.compute_s * self._jitter())
        self._world.hosts.spend(part * self._model.host_s * self._jitter())

    def _leg_s(self, group: Group) -> float:
        return group.leg_s * self._jitter()

    def _jitter(self) -> float:
        return max(0.5, self._random.gauss(1.0, JITTER))


class _Kernel(nn.Module):
    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self._run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._run()
        return x


class Filler(Job):
    """A job that only computes: forwards of some large matrices.

    Args:
        world: where it runs.
        lease: with which it takes turns, or None.
    """

    def __init__(self, world: World, lease: SimLease | None) -> None:
        super().__init__(world, "filler", lease)

    def run(self, until_s: float) -> None:
        """Compute until then."""
        hosts = self._world.hosts
        process, stream = self._world.begin_process()

        def launch() -> None:
            stream.stream.compute(FILLER_KERNEL_S)
            hosts.spend(FILLER_LAUNCH_S)

        network = nn.Sequential(*(_Kernel(launch) for _ in range(FILLER_KERNELS)))
        instrument = None
        if self.lease is not None:
            ahead = RunAhead(4e-3, lambda: _event(stream))
            instrument = Instrument(self.lease, network, None, 5e-3, ahead)
        x = torch.zeros(1)
        while hosts.now_s < until_s:
            with torch.no_grad():
                network(x)
            self._step_queued(process, stream)
        self._step_queued(process, stream, ahead=0)
        if instrument is not None:
            instrument.remove()


def _event(stream: SimStream) -> Any:
    return SimEvent(stream)
