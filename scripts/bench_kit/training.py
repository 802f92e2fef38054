"""What ranks train, and how a turn of it is timed. For code that runs inside of a process group.

A turn is

    barrier - one step that is not timed - timed steps - deferred work is finished, not timed

DeAR ends a step's gather legs in the next step's forward. The step that is not timed hands such legs into the timed
part, and the last timed step hands as many out of it. So every arm is timed over the same number of complete steps, as
in the middle of a long run, and no arm's work runs in the turn of another.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import ddp_crossover as dx
from bench_kit.launch import sent_bytes
from bench_kit.paced import Pace, paced_network
from bench_kit.thread_times import processor_s

LEARNING_RATE = 1e-4
# DDP rebuilds its buckets in the second step, and after that PowerSGD starts.
WARM_UP_STEPS = 6
# Ranks ask each other in every so many steps whether all are warm: the tuner measures the steps between these without.
STEPS_BETWEEN_QUESTIONS = 8
# Steps after which a pipeline that has started runs evenly.
PIPELINED_STEPS = 3
CALIBRATION_STEPS = 3
CALIBRATION_TURNS = 3


class ArmRefused(Exception):
    """This arm cannot run here; says why. Raised on all ranks alike."""


class Workload(NamedTuple):
    """What one case trains.

    `build()` makes a fresh network with the same weights each time. `loss(network)` is one forward, with the same batch
    each time. `units(network)` are the parts that FSDP2 shards one by one. `pace` is set for paced layers.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    units: Callable[[nn.Module], list[nn.Module]]
    pace: Pace | None = None


def paced_workload(sizes: list[int], blocks: int, pace: Pace) -> Workload:
    """Paced layers of these sizes in equal blocks."""
    x = torch.ones(1)
    return Workload(
        lambda: paced_network(sizes, blocks, pace),
        lambda network: network(x).sum(),
        lambda network: list(network.children()),
        pace,
    )


class Arm:
    """One way of training, ready to step.

    Args:
        workload: what to train.
        network: the network, wrapped.
        optimizer: its optimizer.
        state: the state of `ddp_crossover`, where the arm uses it.
    """

    def __init__(
        self, workload: Workload, network: nn.Module, optimizer: Optimizer, state: dx.DearState | None = None
    ) -> None:
        self._workload, self._network, self.optimizer, self.state = workload, network, optimizer, state
        self.processor_s: list[dict[str, float]] = []
        """Processor time of this process by the roles of its threads, per step of each turn."""
        self.sent_bytes: list[float] = []
        """What this rank's host has sent, per step of each turn; empty where ranks share a host."""

    def step(self) -> None:
        """One training step, as in any script."""
        self.optimizer.zero_grad()
        self._workload.loss(self._network).backward()
        self.optimizer.step()

    def warm_up(self, limit: int) -> int:
        """Step until the figures are those of a long run; returns the number of steps.

        Raises:
            ArmRefused: if that takes more than `limit` steps.
        """
        for steps in range(1, limit + 1):
            self.step()
            if steps % STEPS_BETWEEN_QUESTIONS:
                continue
            # Ranks must stop together, and one of them may see the end of the tuning before the others.
            settled = torch.tensor(int(steps >= WARM_UP_STEPS and self._is_settled()))
            dist.all_reduce(settled, op=dist.ReduceOp.MIN)
            if settled.item():
                return steps
        raise ArmRefused(f"not settled after {limit} steps")

    def _is_settled(self) -> bool:
        """Whether the pipeline runs evenly, or is not going to run."""
        if self.state is None or self.state.detached:
            return True
        stats = self.state.stats()
        return not self.state.tuning and (stats.pipelined_iterations >= PIPELINED_STEPS or bool(stats.fallbacks))

    def turn_s(self, steps: int) -> float:
        """Seconds per step of one turn; see the top of this file."""
        dist.barrier()
        self.step()
        sent_before_bytes = sent_bytes()
        start, used_before_s = time.perf_counter(), processor_s()
        for _ in range(steps):
            self.step()
        seconds = (time.perf_counter() - start) / steps
        self.processor_s.append({role: (s - used_before_s[role]) / steps for role, s in processor_s().items()})
        sent_after_bytes = sent_bytes()
        if sent_before_bytes is not None and sent_after_bytes is not None:
            self.sent_bytes.append((sent_after_bytes - sent_before_bytes) / steps)
        self.drain()
        return seconds

    def drain(self) -> None:
        """Finish deferred work, so that it does not run in the next arm's turn."""
        if self.state is not None:
            self.state.synchronize()

    def facts(self) -> dict[str, Any]:
        """Fallbacks, plan and tuning of `ddp_crossover`, for the record."""
        if self.state is None:
            return {}
        stats = self.state.stats()
        return {
            "fallbacks": dict(stats.fallbacks),
            "plan": str(self.state.plan) if self.state.plan else None,
            "tuning": self.state.tuning_progress(),
        }

    def close(self) -> None:
        if self.state is not None:
            self.state.detach()


def set_pace(pace: Pace, layers: int, compute_s: float, arm: Arm) -> list[float]:
    """Set the pace so that a step of `arm`, which does not communicate, takes `compute_s`. Collective.

    The sleeps become so much shorter as the rest of a step takes. Returns seconds per step at that pace, turn by turn.
    """
    pace.forward_s = compute_s / 3 / layers
    # The shortest of several turns: a slow moment of the machine must not become a faster pace for the whole run.
    not_sleep_s = min(_calibration_turns_s(arm)) - compute_s
    pace.forward_s = max(0.0, compute_s - not_sleep_s) / 3 / layers
    return _calibration_turns_s(arm)


def _calibration_turns_s(arm: Arm) -> list[float]:
    return mean_over_ranks([arm.turn_s(CALIBRATION_STEPS) for _ in range(CALIBRATION_TURNS)])


def mean_over_ranks(own_s: list[float]) -> list[float]:
    """Means over ranks. They train in step, so their times differ by little more than where the clock started."""
    sums_s = torch.tensor(own_s, dtype=torch.float64)
    dist.all_reduce(sums_s)
    return (sums_s / dist.get_world_size()).tolist()


def all_reduces_s(
    flat: Tensor, warm_up: int, times: int, process_group: dist.ProcessGroup | None = None
) -> list[float]:
    """Seconds that an all-reduce of a buffer takes on the slowest rank, `times` times. Collective."""
    own_s = []
    for _ in range(warm_up + times):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat, group=process_group)
        own_s.append(time.perf_counter() - start)
    slowest_s = torch.tensor(own_s[warm_up:], dtype=torch.float64)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return slowest_s.tolist()
