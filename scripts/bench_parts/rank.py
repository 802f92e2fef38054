"""What each rank does.

All arms live in this process and take turns, a few steps each, so that a slow moment of the machine hits all of them.
"""

import gc
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench_kit.launch import tell
from bench_kit.paced import sleep_accurately
from bench_kit.rounds import turns
from bench_kit.thread_times import COLUMNS
from bench_kit.training import Arm, ArmRefused, Workload, all_reduces_s, mean_over_ranks, set_pace
from bench_parts.arms import STATE_COPIES, ArmName, make_arm
from bench_parts.cases import CaseSettings, make_workload
from bench_parts.prediction import measured_profile, predicted_steps_s
from bench_parts.stragglers import Straggler

ALL_REDUCES_PER_TURN = 2
# Weights, gradients and one more buffer of that size, for an arm on one host; optimizer state comes on top.
COPIES_PER_ARM = 3


def measure(settings: CaseSettings) -> dict[str, Any]:
    """Measure one case on this rank."""
    torch.set_flush_denormal(True)  # gradients of a network that has learned its one batch would slow it down
    return Rank(settings).run()


class Rank:
    """One rank of one case.

    Args:
        settings: the case.
    """

    def __init__(self, settings: CaseSettings) -> None:
        self._settings = settings
        self._workload: Workload = make_workload(settings)
        numels = [parameter.numel() for parameter in self._workload.build().parameters()]
        self._parameters, self._tensors = sum(numels), len(numels)
        self._flat = torch.zeros(self._parameters)
        copies = COPIES_PER_ARM + STATE_COPIES[settings.optimizer]
        refuse_too_many_arms(len(settings.arms), copies * self._flat.nbytes)
        self._arms: dict[str, Arm] = {}
        self._refused: dict[str, str] = {}
        self._warm_up_steps: dict[str, int] = {}
        # How long it took to make each arm, with its attach, and to warm it up.
        self._make_s: dict[str, float] = {}
        self._warm_up_s: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """Measure; returns every figure, with times that hold for all ranks together."""
        a_s = min(all_reduces_s(self._flat, warm_up=2, times=5))
        self._start("noop")
        if self._settings.ratio is not None:
            assert self._workload.pace is not None
            sleep_accurately()
            set_pace(self._workload.pace, self._tensors, a_s / self._settings.ratio, self._arms["noop"])
        for name in self._settings.arms:
            if name != "noop":
                self._start(name)
        # All objects of now stay alive: the garbage collector need not look through them during a turn.
        gc.collect()
        gc.freeze()
        flat_s, rounds_s = self._rounds()
        facts = {name: arm.facts() for name, arm in self._arms.items()}
        processor_s = {name: self._processor_s(arm) for name, arm in self._arms.items()}
        sent_bytes = {
            name: mean_over_ranks(arm.sent_bytes[-self._settings.rounds :])
            for name, arm in self._arms.items()
            if arm.sent_bytes
        }
        for name, step_s in predicted_steps_s(self._arms).items():
            facts[name]["predicted_step_s"] = step_s
        profile = measured_profile(self._arms)
        for arm in self._arms.values():
            arm.close()
        return {
            "case": {
                "parameters": self._parameters,
                "tensors": self._tensors,
                "hosts": dist.get_world_size(),
                "gradient_bytes": self._flat.nbytes,
                "all_reduce_at_start_s": a_s,
                "paced_forward_s_per_layer": self._workload.pace.forward_s if self._workload.pace else None,
                "threads_per_rank": torch.get_num_threads(),
                "all_reduces_s": flat_s,
            },
            "rounds_s": rounds_s,
            "processor_s": processor_s,
            "sent_bytes": sent_bytes,
            "refused": self._refused,
            "warm_up_steps": self._warm_up_steps,
            "make_s": self._make_s,
            "warm_up_s": self._warm_up_s,
            "facts": facts,
            "profile": profile.to_json() if profile else None,
        }

    def _processor_s(self, arm: Arm) -> dict[str, list[float]]:
        """Processor time per step of each round by the roles of threads, the mean over ranks. Collective."""
        rounds = arm.processor_s[-self._settings.rounds :]
        return {role: mean_over_ranks([one[role] for one in rounds]) for role in COLUMNS}

    def _start(self, name: str) -> None:
        tell(f"warming up {name}", 0.0)
        try:
            settings = self._settings
            slow = None if settings.straggler is None else Straggler.parse(settings.straggler)
            dist.barrier()
            start_s = time.perf_counter()
            arm = make_arm(ArmName.parse(name), self._workload, settings.fusion_mb, settings.optimizer, slow)
            made_s = time.perf_counter()
            self._warm_up_steps[name] = arm.warm_up(self._settings.warm_up_limit)
            self._make_s[name], self._warm_up_s[name] = made_s - start_s, time.perf_counter() - made_s
            arm.drain()
        except ArmRefused as reason:
            self._refused[name] = str(reason)
        except RuntimeError as error:
            # A backend's own refusal comes with the first step, on all ranks alike.
            self._refused[name] = f"failed on {dist.get_backend()}: {str(error).splitlines()[0]}"
        else:
            self._arms[name] = arm

    def _rounds(self) -> tuple[list[float], dict[str, list[float]]]:
        """Seconds of all flat all-reduces, and for each arm seconds per step of each round."""
        names = ["", *self._arms]  # the flat all-reduce takes a turn as well
        own_s: dict[str, list[float]] = {name: [] for name in self._arms}
        flat_s: list[float] = []
        for turn in turns(len(names), self._settings.rounds):
            name = names[turn.index]
            tell(f"round {turn.round + 1} of {self._settings.rounds}: {name or 'flat all-reduce'}", turn.behind)
            if name:
                own_s[name].append(self._arms[name].turn_s(self._settings.steps))
            else:
                flat_s += all_reduces_s(self._flat, warm_up=1, times=ALL_REDUCES_PER_TURN)
        return flat_s, {name: mean_over_ranks(times) for name, times in own_s.items()}


def refuse_too_many_arms(arms: int, arm_bytes: int) -> None:
    """Raise MemoryError if the arms of all hosts, which share this machine's memory, would not fit."""
    wanted_bytes = arm_bytes * arms * dist.get_world_size()
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available_bytes = 1024 * int(meminfo["MemAvailable"].split()[0])
    if wanted_bytes > available_bytes:
        raise MemoryError(
            f"{arms} arms on {dist.get_world_size()} hosts need about {wanted_bytes / 2**30:.0f} GiB of memory, and "
            f"{available_bytes / 2**30:.0f} GiB are free: choose fewer with --arms and --buckets"
        )
