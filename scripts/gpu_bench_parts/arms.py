"""Arms on one GPU: each has its own network, optimizer and hook, and all share the wire and take turns."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import ddp_crossover as dx
from bench_kit.device_time import between_s, now, synchronize
from bench_kit.training import LEARNING_RATE, WARM_UP_STEPS, Arm, ArmRefused, Workload
from ddp_crossover.report.trace import Trace
from gpu_bench_parts.settings import ArmSettings, CaseSettings
from gpu_bench_parts.wire import GBIT, Wire

TRACED_STEPS = 6
# What the tuner has found comes into force with the next forward.
STEPS_TO_LEAVE = 2


class GpuArm(Arm):
    """One way of training.

    Args:
        arm: what is special about it.
        case: what it shares with the other arms.
        workload: what to train.
        wire: what gradients travel over.
        device: the device.
        fusion_mb: group size, for an arm of ours; None to let it tune.
        process_group: of the model; by default the one of all ranks.
        lease: of an arm of ours.
    """

    def __init__(
        self,
        arm: ArmSettings,
        case: CaseSettings,
        workload: Workload,
        wire: Wire,
        device: torch.device,
        fusion_mb: float | None,
        process_group: dist.ProcessGroup | None = None,
        lease: dx.GpuLease | None = None,
    ) -> None:
        self.settings, self._case, self._wire, self._device = arm, case, wire, device
        self.host_s: list[float] = []
        """Seconds per step until the host had handed everything to the device, for each turn."""
        self._plug_in()
        self.ddp = DistributedDataParallel(
            workload.build(),
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=process_group,
            bucket_cap_mb=arm.bucket_mb,
            gradient_as_bucket_view=True,
        )
        make_optimizer = AdamW if case.optimizer == "adamw" else SGD
        optimizer = make_optimizer(self.ddp.parameters(), lr=LEARNING_RATE)
        self.timer: dx.DdpTimer | None = None
        state = dx.attach(self.ddp, optimizer, fusion_mb=fusion_mb, lease=lease) if arm.is_ours else None
        super().__init__(workload, self.ddp, optimizer, state)
        if not arm.communicates:
            self.ddp.register_comm_hook(None, noop_hook)
        elif state is None:
            self._time_plain_ddp()

    def step(self) -> None:
        super().step()
        if self.state is not None and self.state.detached and self.timer is None:
            self._time_plain_ddp()  # the tuner has left DDP alone, whose own all-reduces know no wire

    def warm_up(self, limit: int) -> int:
        """Step until the figures are those of a long run; returns the number of steps.

        Raises:
            ArmRefused: if that takes more than `limit` steps.
        """
        self._plug_in()
        for steps in range(1, limit + 1):
            self.step()
            if steps >= WARM_UP_STEPS and self._is_settled():
                for _ in range(STEPS_TO_LEAVE):
                    self.step()
                self.drain()
                return steps
        raise ArmRefused(f"not settled after {limit} steps")

    def turn_s(self, steps: int) -> float:
        """Seconds per step of one turn, as `bench_kit.training` describes it, on the device's clock.

        The stream gets to both ends in the middle of a run: nothing is synchronized between the steps.
        """
        self._plug_in()
        self.step()
        begin, began_s = now(self._device), time.perf_counter()
        for _ in range(steps):
            self.step()
        end, ended_s = now(self._device), time.perf_counter()
        self.drain()
        synchronize(self._device)
        self.host_s.append((ended_s - began_s) / steps)
        return between_s(begin, end) / steps

    def trace(self) -> Trace | None:
        """A trace of a few steps; None without communication."""
        self._plug_in()
        source: Any = self.timer or self.state
        if source is None:
            return None
        for _ in range(2):
            self.step()
        with source.trace() as trace:
            for _ in range(TRACED_STEPS):
                self.step()
            self.drain()
        synchronize(self._device)
        trace.title = self.settings.name
        return trace

    def facts(self) -> dict[str, Any]:
        """As those of `Arm`, and whether DDP was left alone."""
        return {**super().facts(), "left_alone": self.state is not None and self.state.detached}

    @property
    def fusion_mb(self) -> float | None:
        """The group size that this arm has ended with, if it runs a pipeline."""
        return self.state.plan.fusion_mb if self.state is not None and self.state.plan is not None else None

    def _plug_in(self) -> None:
        has_wire = self.settings.has_wire
        self._wire.bytes_per_s = self._case.gbit_per_s * GBIT if has_wire else float("inf")
        self._wire.latency_s = self._case.latency_s if has_wire else 0.0
        self._wire.twins_add = self.settings.is_ours and getattr(self, "timer", None) is None

    def _time_plain_ddp(self) -> None:
        self.timer = dx.DdpTimer(self.ddp, self.optimizer)
        self._plug_in()
