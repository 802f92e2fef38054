"""Checks of setups that are legal and rare: a trace on a GPU, and DDP that was built on another stream."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddp_crossover as dx
from bench_kit.device_time import synchronize
from gpu_check_parts import checks, disturbances
from gpu_check_parts.training import Job, Recipe

TRACED_STEPS = 6
# Times of a saved trace are in whole microseconds.
ROUNDING_S = 2e-6


def trace(device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """A trace must have every kind of span, in an order that makes sense, and come back from its file."""
    job = Job(recipe, device, dist.get_rank(), with_dear=True)
    with disturbances.late_legs(device, own_shard_is_read=False):  # so that legs have a length
        for index in range(recipe.steps):
            job.step([job.batch(index)])
        with job.state.trace() as traced:
            for index in range(TRACED_STEPS):
                job.step([job.batch(index)])
            job.state.synchronize()
        synchronize(device)
    spans = traced.spans()
    kinds = {span.kind for span in spans}
    expected = {"step", "forward", "backward", "update", "scatter", "gather"}
    if device.type == "cuda":  # on a CPU a single rank has nothing to wait for
        expected.add("wait")
    assert expected <= kinds, f"no span of {sorted(expected - kinds)} in the trace, only {sorted(kinds)}"
    assert all(span.begin_s <= span.end_s for span in spans), "a span ends before it begins"
    early = [span for span in spans if span.kind == "gather" and not _follows_its_scatter(span, spans)]
    assert not early, f"{len(early)} gather legs begin before the scatter leg of their group: {early[0]}"
    steps = traced.steps()
    assert len(steps) >= TRACED_STEPS - 1, f"{len(steps)} complete steps of {TRACED_STEPS}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        traced.save(path)
        loaded = dx.Trace.load(path).spans()
    assert len(loaded) == len(spans), f"{len(loaded)} of {len(spans)} spans came back from the file"
    furthest_s = max(abs(one.begin_s - other.begin_s) for one, other in zip(loaded, spans, strict=True))
    assert furthest_s < ROUNDING_S, f"a span has moved by {furthest_s} s in the file"
    job.close()
    last = steps[-1]
    return {
        "spans": len(spans),
        "step_s": last.duration_s,
        "exposed_s": last.exposed_s,
        "noticed": f"{len(spans)} spans; a step of {last.duration_s * 1e3:.1f} ms, "
        f"{last.exposed_s * 1e3:.1f} ms of it exposed",
    }


def _follows_its_scatter(gather: Any, spans: list[Any]) -> bool:
    scatters = [span for span in spans if span.kind == "scatter" and span.group == gather.group]
    before = [span for span in scatters if span.begin_s <= gather.begin_s]
    # The scatter leg of the first traced gather leg may have run before the trace.
    return bool(before) or not scatters or gather.begin_s <= min(span.begin_s for span in scatters)


def built_on_another_stream(device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """Build model, DDP and DeAR on a side stream, train on the default one."""
    checks.deterministic()

    def train(*, with_dear: bool) -> tuple[dict[str, Any], Any]:
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            job = Job(recipe, device, dist.get_rank(), with_dear)
        torch.cuda.current_stream(device).wait_stream(side)
        try:
            return job.train(), job.state.stats() if job.state is not None else None
        finally:
            job.close()

    expected, _ = train(with_dear=False)
    seen, stats = train(with_dear=True)
    largest = checks.judge_bits(recipe, seen, expected)
    return {"largest_difference": largest, "pipelined": f"{stats.pipelined_iterations}/{stats.iterations}"}


def gathers_on_copy_engines(device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """The bits of plain DDP, and steps without an all-gather kernel: without copy engines NCCL takes one, silently."""
    figures = checks.equivalence(device, recipe)
    job = Job(recipe, device, dist.get_rank(), with_dear=True)
    try:
        for index in range(recipe.steps):
            job.step([job.batch(index)])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for index in range(TRACED_STEPS):
                job.step([job.batch(index)])
            job.state.synchronize()
            synchronize(device)
    finally:
        job.close()
    kernels = sorted({event.name for event in profile.events() if event.name.startswith("nccl")})
    assert any("ReduceScatter" in name for name in kernels), f"no scatter leg in the profile: {kernels}"
    assert not any("AllGather" in name for name in kernels), f"gathered by kernels: {kernels}"
    return figures | {"kernels": ", ".join(kernels)}
