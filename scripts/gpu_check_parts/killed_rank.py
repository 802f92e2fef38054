"""The part `killed-rank`: one of two ranks is killed in mid-training; how and how soon the other one ends."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bench_kit.device_time import synchronize
from bench_kit.ranks import Launch
from gpu_check_parts import two_ranks
from gpu_check_parts.case import Case, two_ranks_over_gloo
from gpu_check_parts.exact import SGD
from gpu_check_parts.runner import Runner
from gpu_check_parts.training import Job, Recipe

VICTIM = 1
STEPS_BEFORE = 10
# Of the process group. The end must come soon after, whatever brings it.
GROUP_TIMEOUT_S = 15.0
LIMIT_S = 75.0


def run(runner: Runner) -> None:
    """Over gloo, then over NCCL where that is possible."""
    runner.run_all(_cases(two_ranks_over_gloo(runner.device), "gloo"))
    two_ranks.run_over_nccl(runner, lambda launch: _cases(launch, "NCCL"))


def _cases(launch: Launch, backend: str) -> Iterator[Case]:
    launch = replace(launch, victim=VICTIM, group_timeout_s=GROUP_TIMEOUT_S)
    for name, recipe in {
        "pipeline": Recipe(options=SGD),
        "plain all-reduces": Recipe(options=SGD, schedule="allreduce"),
    }.items():
        yield Case("killed rank", f"{backend}, {name}", survive, (recipe,), launch, alone=True, limit_s=LIMIT_S)


def survive(device: torch.device, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Train; the victim kills itself after some steps. The other rank says what it meets, if it gets to know.

    If a watchdog of torch's ends it, its exit code stands in the record instead, and how long it took.
    """
    job = Job(recipe, device, dist.get_rank(), with_dear=True)
    for index in range(STEPS_BEFORE):
        job.step([job.batch(index)])
    synchronize(device)
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    yield {"survivor": True}
    index = STEPS_BEFORE
    try:
        while True:
            job.step([job.batch(index)])
            synchronize(device)
            index += 1
    except Exception as error:
        message = str(error).splitlines()[0] if str(error) else ""
        yield {
            "after_s": time.monotonic() - start_s,
            "steps": index - STEPS_BEFORE,
            "raised": type(error).__name__,
            "message": str(error),
            "noticed": f"{type(error).__name__} after {time.monotonic() - start_s:.1f} s: {message}",
        }
