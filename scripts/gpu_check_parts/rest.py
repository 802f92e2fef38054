"""The part `rest`: traces, CUDA graphs, DDP built on another stream, no `set_device`, `torch.compile`, alignment."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddp_crossover as dx
from bench_kit.device_time import synchronize
from bench_kit.ranks import Launch
from gpu_check_parts import alignment, checks, disturbances, graphs, two_ranks
from gpu_check_parts.case import ENVIRONMENT, Case, one_rank
from gpu_check_parts.exact import ADAMW, SGD, WIDE
from gpu_check_parts.runner import Runner
from gpu_check_parts.training import Job, Recipe

GROUP = "rest"
COMPILE_LIMIT_S = 120.0  # inductor starts compiler processes of its own
TRACED_STEPS = 6
# Times of a saved trace are in whole microseconds.
ROUNDING_S = 2e-6


def run(runner: Runner) -> None:
    """One case each, alignment last."""
    device = runner.device
    runner.run_all(_setups(device))
    _run_on_two_gpus(runner)
    runner.run_all(
        [Case(GROUP, "alignment: copies and updates", alignment.copies_and_updates, (), one_rank(device), alone=True)]
    )
    two_ranks.run_over_nccl(
        runner, lambda launch: [Case(GROUP, "alignment: legs over NCCL", alignment.legs, (), launch, alone=True)]
    )


def _setups(device: str) -> Iterator[Case]:
    launch = one_rank(device)
    adamw = Recipe("AdamW", ADAMW)
    wide = checks.on(Recipe("AdamW", {"lr": 0.001}, **WIDE), device)
    yield Case(GROUP, "trace", trace, (wide,), launch, alone=True)
    built = built_on_another_stream
    yield Case(GROUP, "DDP built on another stream", built, (wide,), launch, alone=True, needs_cuda=True)
    for late in (False, True):
        name = f"a CUDA graph, captured {'after' if late else 'before'} the first plan"
        yield Case(GROUP, name, graphs.graph_captured, (Recipe(options=SGD), late), launch, alone=True, needs_cuda=True)
    # What inductor generates makes no difference to hooks, and a CPU may lack the compiler that it needs.
    compiled = replace(adamw, compiled="aot_eager" if device == "cpu" else "inductor")
    yield Case(GROUP, "torch.compile", checks.equivalence, (compiled,), launch, alone=True, limit_s=COMPILE_LIMIT_S)


def _run_on_two_gpus(runner: Runner) -> None:
    """On a GPU that is not the current one, and between two."""
    other = Launch("nccl", ("cuda:1",), ENVIRONMENT, bind_device=True, set_device=False)
    sgd = Recipe(options=SGD)
    no_set_device = Case(GROUP, "no set_device", checks.equivalence, (sgd,), other, alone=True, needs_cuda=True)
    both = Launch("nccl", ("cuda:0", "cuda:1"), ENVIRONMENT)
    adamw = Recipe("AdamW", ADAMW, schedule="dear", copy_engines=True)
    check = gathers_on_copy_engines
    copies = Case(GROUP, "gather legs on copy engines", check, (adamw,), both, alone=True, needs_cuda=True)
    for case, why in ((no_set_device, ": with one, it is the current device anyway"), (copies, "")):
        if runner.device != "cpu" and torch.cuda.device_count() < 2:
            runner.skip_all([case], f"needs two GPUs{why}")
        else:
            runner.run_all([case])


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
