"""The rank's side: `python -m bench_parts.rank SETTINGS RESULT`, once per rank, with torchrun's environment.

All arms live in this process and take turns, a few steps each, so that a slow moment of the machine hits all. A turn is

    barrier - one step that is not timed - `steps` timed steps - whatever was put off is finished, not timed

DeAR ends a step's gather legs in the next step's forward. The step that is not timed hands such legs into the timed
part, and the last timed step hands as many out of it; so every arm is timed over the same number of complete steps, as
in the middle of a long run, and nothing of one arm's work runs in another's turn.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench_parts import paced
from bench_parts.arms import Arm, ArmName, ArmRefused, make_arm
from bench_parts.prediction import predicted_steps_s
from bench_parts.settings import CaseSettings
from bench_parts.workloads import Workload, make_workload

CALIBRATION_STEPS = 2
ALL_REDUCES_PER_TURN = 2
CALIBRATION_TURNS = 3
# Weights, gradients and one more buffer of that size, for an arm on one host.
COPIES_PER_ARM = 3
TIMEOUT = timedelta(seconds=120)


class Rank:
    """One rank of one case.

    Args:
        settings: the case.
        progress: called with what is done now, and the share of all work that is behind.
    """

    def __init__(self, settings: CaseSettings, progress: Callable[[str, float], None]) -> None:
        self._settings, self._progress = settings, progress
        self._workload: Workload = make_workload(settings)
        numels = [parameter.numel() for parameter in self._workload.build().parameters()]
        self._parameters, self._tensors = sum(numels), len(numels)
        self._flat = torch.zeros(self._parameters)
        refuse_too_many_arms(len(settings.arms), self._flat.nbytes)
        self._arms: dict[str, Arm] = {}
        self._refused: dict[str, str] = {}
        self._warm_up_steps: dict[str, int] = {}

    def run(self) -> dict[str, Any]:
        """Measure; returns every figure, with times that hold for all ranks together."""
        a_s = min(all_reduces_s(self._flat, warm_up=2, times=5))
        self._start("noop")
        if self._settings.ratio is not None:
            self._set_pace(compute_s=a_s / self._settings.ratio)
        for name in self._settings.arms:
            if name != "noop":
                self._start(name)
        # What is alive now stays so: the garbage collector need not look at it in somebody's turn.
        gc.collect()
        gc.freeze()
        flat_s, rounds_s = self._rounds()
        facts = {name: arm.facts() for name, arm in self._arms.items()}
        for name, step_s in predicted_steps_s(self._arms).items():
            facts[name]["predicted_step_s"] = step_s
        for arm in self._arms.values():
            arm.close()
        return {
            "parameters": self._parameters,
            "tensors": self._tensors,
            "gradient_bytes": self._flat.nbytes,
            "calibration_s": a_s,
            "forward_s": self._workload.pace.forward_s if self._workload.pace else None,
            "threads": torch.get_num_threads(),
            "all_reduces_s": flat_s,
            "rounds_s": rounds_s,
            "refused": self._refused,
            "warm_up_steps": self._warm_up_steps,
            "facts": facts,
        }

    def _start(self, name: str) -> None:
        self._progress(f"warming up {name}", 0.0)
        try:
            arm = make_arm(ArmName.parse(name), self._workload, self._settings.fusion_mb)
            self._warm_up_steps[name] = arm.warm_up(self._settings.warm_up_limit)
            arm.drain()
        except ArmRefused as reason:
            self._refused[name] = str(reason)
        except RuntimeError as error:
            # A backend's own refusal comes with the first step, on all ranks alike.
            self._refused[name] = f"failed on {dist.get_backend()}: {str(error).splitlines()[0]}"
        else:
            self._arms[name] = arm

    def _set_pace(self, compute_s: float) -> None:
        """Let a step without communication take `compute_s`, sleeps and the rest of it together."""
        pace, noop = self._workload.pace, self._arms["noop"]
        assert pace is not None
        paced.sleep_accurately()
        pace.forward_s = compute_s / 3 / self._tensors
        # The shortest of several: a slow moment of the machine must not become a faster pace for the whole run.
        not_sleep_s = (
            min(self._mean([self._turn(noop, CALIBRATION_STEPS) for _ in range(CALIBRATION_TURNS)])) - compute_s
        )
        pace.forward_s = max(0.0, compute_s - not_sleep_s) / 3 / self._tensors

    def _rounds(self) -> tuple[list[float], dict[str, list[float]]]:
        names = ["", *self._arms]  # the flat all-reduce takes a turn as well
        own_s: dict[str, list[float]] = {name: [] for name in self._arms}
        flat_s: list[float] = []
        for number in range(self._settings.rounds):
            first = number % len(names)
            for place, name in enumerate(names[first:] + names[:first]):
                behind = (number + place / len(names)) / self._settings.rounds
                self._progress(f"round {number + 1} of {self._settings.rounds}: {name or 'flat all-reduce'}", behind)
                if name:
                    own_s[name].append(self._turn(self._arms[name], self._settings.steps))
                else:
                    flat_s += all_reduces_s(self._flat, warm_up=1, times=ALL_REDUCES_PER_TURN)
        return flat_s, {name: self._mean(times) for name, times in own_s.items()}

    def _turn(self, arm: Arm, steps: int) -> float:
        """Seconds per step; see the top of this file."""
        dist.barrier()
        arm.step()
        start = time.perf_counter()
        for _ in range(steps):
            arm.step()
        seconds = (time.perf_counter() - start) / steps
        arm.drain()
        return seconds

    def _mean(self, own_s: list[float]) -> list[float]:
        """Means over ranks. They train in step, so their times differ by little more than where the clock started."""
        sums_s = torch.tensor(own_s, dtype=torch.float64)
        dist.all_reduce(sums_s)
        return (sums_s / dist.get_world_size()).tolist()


def all_reduces_s(flat: torch.Tensor, warm_up: int, times: int) -> list[float]:
    """Seconds that gloo's all-reduce of a buffer takes on the slowest rank, `times` times. Collective."""
    own_s = []
    for _ in range(warm_up + times):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat)
        own_s.append(time.perf_counter() - start)
    slowest_s = torch.tensor(own_s[warm_up:], dtype=torch.float64)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return slowest_s.tolist()


def refuse_too_many_arms(arms: int, gradient_bytes: int) -> None:
    """Raise MemoryError if the arms of all hosts, which share this machine's memory, would not fit."""
    wanted_bytes = COPIES_PER_ARM * gradient_bytes * arms * dist.get_world_size()
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available_bytes = 1024 * int(meminfo["MemAvailable"].split()[0])
    if wanted_bytes > available_bytes:
        raise MemoryError(
            f"{arms} arms on {dist.get_world_size()} hosts need about {wanted_bytes / 2**30:.0f} GiB of memory, and "
            f"{available_bytes / 2**30:.0f} GiB are free: choose fewer with --arms and --buckets"
        )


def main() -> None:
    """Run one rank; rank 0 prints its progress, one JSON object a line, and writes the result."""
    settings, result_file = CaseSettings.read(Path(sys.argv[1])), Path(sys.argv[2])
    torch.set_flush_denormal(True)  # gradients of a network that has learned its one batch would slow it down
    dist.init_process_group("gloo", timeout=TIMEOUT)
    is_first = dist.get_rank() == 0

    def progress(what: str, behind: float) -> None:
        if is_first:
            print(json.dumps({"doing": what, "behind": behind}), flush=True)

    result = Rank(settings, progress).run()
    if is_first:
        result_file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
