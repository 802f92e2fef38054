"""The part `lease`: what a job that gives its turn away leaves on the GPU, and what two jobs get out of one GPU."""

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import ddp_crossover as dx
from bench_kit.device_time import Sleeper, now, synchronize, wait_for
from bench_kit.ranks import Launch
from bench_kit.rounds import spread
from ddp_crossover.addons.lease.directory import DIRECTORY_VARIABLE
from gpu_bench_parts.settings import CaseSettings
from gpu_bench_parts.workloads import SMALL
from gpu_check_parts import mps
from gpu_check_parts.case import Case, two_ranks_over_gloo
from gpu_check_parts.runner import Runner
from gpu_check_parts.sharing import Filler, Sharing, connected_lease, share

GROUP = "lease"
LIMIT_S = 80.0
BACKLOG_S = 0.3
# What a release to a job that waits may leave behind.
LEFT_BEHIND_S = 0.03
CONTENDED_WITHIN_S = 3.0
REQUESTS = 60
MOST_APART_S = 0.04


def run(runner: Runner) -> None:
    """With a broker of their own, so that no job of somebody else's takes part."""
    is_rehearsal = runner.device == "cpu"
    training = CaseSettings(SMALL, 2.0, precision="fp32") if is_rehearsal else CaseSettings("resnet50", 25.0)
    with tempfile.TemporaryDirectory(prefix="gpu-check-lease-") as directory:
        two = two_ranks_over_gloo(runner.device)
        two = replace(two, environment={**two.environment, DIRECTORY_VARIABLE: directory})
        runner.run_all([Case(GROUP, "drain: what a release leaves on the GPU", drain, (), two, True)])
        mps.run_with_and_without(runner, lambda which: _cases(which, two, training))
        four = replace(two, devices=two.devices * 2)
        staged = Sharing(training, "training", ranks_per_job=2)
        name = "two jobs of two ranks each, gloo through host memory"
        runner.run_all([Case(GROUP, name, share, (staged,), four, True, limit_s=LIMIT_S)])


def _cases(which: str, launch: Launch, training: CaseSettings) -> Iterator[Case]:
    yield Case(GROUP, f"run-ahead: how soon a filler gives way, {which}", run_ahead, (), launch, True)
    for name, sharing in {
        "gaps: training and a filler": Sharing(training, "filler"),
        "two training jobs": Sharing(training, "training"),
    }.items():
        yield Case(GROUP, f"{name}, {which}", share, (sharing,), launch, True, limit_s=LIMIT_S)


def drain(device: torch.device) -> dict[str, Any]:
    """Rank 0 releases while its GPU is busy. It must not wait, and the next job must get an idle GPU."""
    lease = connected_lease(dist.get_rank(), "peer")
    sleeper = Sleeper(device)
    found: dict[str, Any] = {}
    for name in ("contended", "uncontended"):
        dist.barrier()
        if dist.get_rank() == 0:
            released_s, at_s = _release_while_busy(device, lease, sleeper, is_contended=name == "contended")
            found[name] = {"release_s": released_s}
        else:
            at_s = _take_over(lease, is_contended=name == "contended")
        idle_s = torch.tensor([at_s], dtype=torch.float64)  # of the host's one clock for all processes
        dist.broadcast(idle_s, src=0)
        if dist.get_rank() == 1:
            found[name] = {"early_s": float(idle_s) - at_s}
    lease.close()
    if dist.get_rank() == 0:
        longest_s = max(case["release_s"] for case in found.values())
        assert longest_s < LEFT_BEHIND_S, f"a release made the host wait for {longest_s:.3f} s"
        return found | {"noticed": f"a release takes the host {longest_s * 1e6:.0f} us"}
    earliest_s = max(case["early_s"] for case in found.values())
    assert earliest_s < LEFT_BEHIND_S, (
        f"a job was granted the GPU {earliest_s:.3f} s before the last one's work was done"
    )
    return found


def _release_while_busy(
    device: torch.device, lease: dx.GpuLease, sleeper: Sleeper, *, is_contended: bool
) -> tuple[float, float]:
    """How long the release took the host, and when the GPU had done everything."""
    assert lease.acquire(), lease.stats().unleased
    dist.barrier()  # the other job asks from now on, or comes later
    if device.type == "cuda":
        sleeper.sleep(BACKLOG_S)
    busy = now(device)
    start_s = time.monotonic()
    while is_contended and not lease.contended:
        assert time.monotonic() - start_s < CONTENDED_WITHIN_S, "the other job does not wait"
        time.sleep(1e-3)
    begin_s = time.perf_counter()
    lease.release()
    released_s = time.perf_counter() - begin_s
    wait_for(busy)
    return released_s, time.monotonic()


def _take_over(lease: dx.GpuLease, *, is_contended: bool) -> float:
    """When the lease was granted."""
    dist.barrier()
    if not is_contended:
        time.sleep(BACKLOG_S / 6)  # after the release, well before the end of the backlog
    assert lease.acquire(), lease.stats().unleased
    granted_s = time.monotonic()
    lease.release()
    return granted_s


def run_ahead(device: torch.device) -> dict[str, Any]:
    """Rank 1 fills the GPU under its lease; rank 0 asks again and again, and looks how soon the GPU is really free."""
    lease = connected_lease(dist.get_rank(), "peer" if dist.get_rank() == 0 else "filler")
    over = torch.zeros(1)
    if dist.get_rank() == 0:
        figures = _ask_again_and_again(device, lease)
        dist.broadcast(over, src=0)
    else:
        filler, forwards = Filler(device, lease), 0
        handle = dist.broadcast(over, src=0, async_op=True)  # arrives when rank 0 has finished
        assert handle is not None
        while not handle.is_completed():
            filler.step()
            forwards += 1
        filler.close()
        figures = {"forwards": forwards, "grants": lease.stats().grants}
    lease.close()
    return figures


def _ask_again_and_again(device: torch.device, lease: dx.GpuLease) -> dict[str, Any]:
    apart, value = random.Random(0), torch.zeros(1, device=device)
    value.add_(1.0)
    synchronize(device)
    granted_s, free_s = [], []
    for _ in range(REQUESTS):
        time.sleep(apart.uniform(0.25, 1.0) * MOST_APART_S)
        begin_s = time.perf_counter()
        assert lease.acquire(), lease.stats().unleased
        at_s = time.perf_counter()
        granted_s.append(at_s - begin_s)
        value.add_(1.0)
        synchronize(device)
        free_s.append(time.perf_counter() - at_s)
        lease.release()
    grant, free = spread(granted_s), spread(free_s)
    return {
        "granted_s": granted_s,
        "first_kernel_s": free_s,
        "noticed": f"granted after {grant['median'] * 1e3:.2f} ms (at most {max(granted_s) * 1e3:.2f}), then the first "
        f"kernel took {free['median'] * 1e3:.2f} ms (at most {max(free_s) * 1e3:.2f})",
    }
