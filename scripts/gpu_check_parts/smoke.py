"""The part `smoke`: whether anything runs at all, and how many seconds one case takes."""

import time
from typing import Any

import torch

from bench_kit.device_time import Sleeper, between_s, now
from gpu_check_parts import checks
from gpu_check_parts.case import Case, one_rank
from gpu_check_parts.exact import ADAMW
from gpu_check_parts.runner import Runner
from gpu_check_parts.training import Recipe

GROUP = "smoke"
ASKED_S = 0.05


def run(runner: Runner) -> None:
    """Three cases, the simplest first."""
    launch = one_rank(runner.device)
    for case in (
        Case(GROUP, "one rank can communicate", checks.can_communicate, (), launch, alone=True),
        Case(GROUP, "sleep kernels are as long as asked for", sleeps, (), launch, alone=True, needs_cuda=True),
        Case(GROUP, "AdamW, the bits of plain DDP", checks.equivalence, (Recipe("AdamW", ADAMW),), launch, alone=True),
    ):
        runner.run_all([case])


def sleeps(device: torch.device) -> dict[str, Any]:
    """Other parts build their wires and backlogs out of sleep kernels, so these must be right."""
    sleeper = Sleeper(device)
    lengths_s = []
    for _ in range(10):
        begin, began_s = now(device), time.perf_counter()
        sleeper.sleep(ASKED_S)
        enqueued_s = time.perf_counter() - began_s
        lengths_s.append(between_s(begin, now(device)))
    longest_s = max(lengths_s)
    assert min(lengths_s) > 0.8 * ASKED_S and longest_s < 1.25 * ASKED_S, f"{ASKED_S} s were asked for: {lengths_s}"
    assert enqueued_s < ASKED_S / 2, f"the host waited {enqueued_s} s for a sleep kernel"
    return {
        "lengths_s": lengths_s,
        "cycles_per_s": sleeper.cycles_per_s,
        "noticed": f"{ASKED_S * 1e3:g} ms asked for, {min(lengths_s) * 1e3:.2f} to {longest_s * 1e3:.2f} ms long; "
        f"{sleeper.cycles_per_s / 1e9:.2f} GHz",
    }
