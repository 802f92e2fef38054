"""The part `host`: what the package costs the host and the memory of the device, where nothing is sent.

At world size 1 over NCCL, with small batches, so that a step takes as long as the host needs to enqueue it.
"""

import gc
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import ddp_crossover as dx
from bench_kit.device_time import synchronize
from bench_kit.rounds import spread
from bench_kit.training import Arm
from ddp_crossover.dear import Pipeline
from ddp_crossover.hook.reducer import Reducer
from ddp_crossover.pipeline.pending_updates import GatherWaits, PendingUpdates
from gpu_bench_parts.settings import CaseSettings
from gpu_bench_parts.workloads import SMALL, make_workload
from gpu_check_parts.case import Case, one_rank
from gpu_check_parts.runner import Runner

FUSION_MB = (1.0, 8.0, 25.0)
SMALL_FUSION_MB = (0.1, 0.5)  # the model of a rehearsal has some 2 MB
WARM_STEPS = 12
STEPS = 20
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 1e-4}),
    "AdamW": (AdamW, {"lr": 1e-4}),
    "AdamW fused": (AdamW, {"lr": 1e-4, "fused": True}),
}
LIMIT_S = 75.0


def run(runner: Runner) -> None:
    """Two models, three optimizers."""
    is_rehearsal = runner.device == "cpu"
    launch = one_rank(runner.device)
    for model, optimizer in (
        ("resnet50", "SGD"),
        ("resnet50", "AdamW"),
        ("resnet50", "AdamW fused"),
        ("bert_base", "AdamW fused"),
    ):
        case = Case(
            "host",
            f"{model}, {optimizer}",
            host_and_memory,
            (SMALL if is_rehearsal else model, optimizer),
            launch,
            alone=True,
            limit_s=LIMIT_S,
        )
        runner.run_all([case])
        if is_rehearsal:
            return


def host_and_memory(device: torch.device, model: str, optimizer: str) -> Iterator[dict[str, Any]]:
    """Plain DDP first, then DeAR in groups of several sizes; the same model and steps each time."""
    settings = CaseSettings(model, 1.0, precision="fp32", batch=2)
    figures: dict[str, Any] = {"plain": _measure(device, settings, optimizer, None), "fusion_mb": {}}
    for fusion_mb in SMALL_FUSION_MB if model == SMALL else FUSION_MB:
        figures["fusion_mb"][f"{fusion_mb:g}"] = _measure(device, settings, optimizer, fusion_mb)
        yield figures | {"noticed": _in_words(figures)}


def _measure(device: torch.device, settings: CaseSettings, optimizer: str, fusion_mb: float | None) -> dict[str, Any]:
    before = _memory(device)
    job = _start(device, settings, optimizer, fusion_mb)
    for _ in range(WARM_STEPS):
        job.step()
    clock, host_s, step_s = HostClock(), [], []
    synchronize(device)
    # Times with and without the clock, which itself takes about a microsecond for each call.
    for _ in range(STEPS):
        enqueued_s, done_s = _time_step(device, job)
        host_s.append(enqueued_s)
        step_s.append(done_s)
    if job.state is not None:
        with clock.timing(_timed_functions(job.state)):
            for _ in range(STEPS):
                _time_step(device, job)
    found = {
        "host_s": spread(host_s),
        "step_s": spread(step_s),
        "own_us": {name: _microseconds(times_s) for name, times_s in clock.own_s.items() if times_s},
        "memory_bytes": {name: value - before[name] for name, value in _memory(device, peak=True).items()},
        "groups": len(job.state.plan.groups) if job.state is not None and job.state.plan is not None else None,
    }
    job.close()
    del job
    _free(device)
    return found


def _start(device: torch.device, settings: CaseSettings, optimizer: str, fusion_mb: float | None) -> Arm:
    workload = make_workload(settings, device)
    ddp = DistributedDataParallel(
        workload.build(), device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    make, options = OPTIMIZERS[optimizer]
    updater = make(ddp.parameters(), **options)
    state = None if fusion_mb is None else dx.attach(ddp, updater, fusion_mb=fusion_mb)
    return Arm(workload, ddp, updater, state)


def _time_step(device: torch.device, job: Arm) -> tuple[float, float]:
    """Seconds until the host has enqueued a step, and until the device is done with it."""
    start_s = time.perf_counter()
    job.step()
    enqueued_s = time.perf_counter() - start_s
    synchronize(device)
    return enqueued_s, time.perf_counter() - start_s


def _timed_functions(state: Any) -> dict[str, tuple[Any, str]]:
    link = type(state._reducer._in_force.pipeline.link)
    return {
        "bucket": (Reducer, "reduce"),
        "scatter leg": (link, "reduce_scatter"),
        "gather leg": (link, "all_gather"),
        "wait for a group": (GatherWaits, "complete"),
        "group update": (PendingUpdates, "_run"),
        "end of backward": (Pipeline, "end_backward"),
        "begin of backward": (Pipeline, "begin_backward"),
    }


class HostClock:
    """Adds up host time of functions, without what other timed functions inside of them take.

    Attributes:
        own_s: for each name, seconds of each call, without calls of other timed functions inside.
    """

    def __init__(self) -> None:
        self.own_s: dict[str, list[float]] = defaultdict(list)
        self._inside = threading.local()  # backward runs on a thread of autograd's

    @contextmanager
    def timing(self, functions: dict[str, tuple[Any, str]]) -> Iterator[None]:
        """Time methods inside of the block.

        Args:
            functions: for each name, a class and the name of its method.
        """
        with ExitStack() as stack:
            for name, (owner, method) in functions.items():
                stack.enter_context(mock.patch.object(owner, method, self._timed(name, getattr(owner, method))))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        own_s, inside = self.own_s[name], self._inside

        def timed(*args: Any, **options: Any) -> Any:
            outer_s = getattr(inside, "others_s", 0.0)
            inside.others_s = 0.0
            start_s = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                elapsed_s = time.perf_counter() - start_s
                own_s.append(elapsed_s - inside.others_s)
                inside.others_s = outer_s + elapsed_s

        return timed


def _microseconds(times_s: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(times_s) * 1e6,
        "calls_per_step": len(times_s) / STEPS,
        "per_step": sum(times_s) / STEPS * 1e6,
    }


def _memory(device: torch.device, *, peak: bool = False) -> dict[str, int]:
    """Bytes of torch's allocator, and of the whole device: NCCL's own memory shows only there."""
    if device.type != "cuda":
        return {}
    if not peak:
        torch.cuda.reset_peak_memory_stats(device)
    free_bytes, all_bytes = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    return {"allocator": allocated, "device": all_bytes - free_bytes}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _in_words(figures: dict[str, Any]) -> str:
    plain = figures["plain"]
    parts = [f"plain DDP {plain['host_s']['median'] * 1e3:.1f} ms of host time a step"]
    for size, found in figures["fusion_mb"].items():
        own_us = found["own_us"]
        costs = ", ".join(f"{name} {own_us[name]['median']:.0f}" for name in own_us if name != "begin of backward")
        memory = ""
        if found["memory_bytes"]:
            more_bytes = found["memory_bytes"]["allocator"] - plain["memory_bytes"]["allocator"]
            memory = f", {more_bytes / 2**20:+.0f} MiB"
        more_s = found["host_s"]["median"] - plain["host_s"]["median"]
        parts.append(f"{size} MiB ({found['groups']} groups): {more_s * 1e3:+.1f} ms{memory} (us: {costs})")
    return "; ".join(parts)
