"""The checks themselves. Each runs on every rank, raises at the first thing that is wrong, and returns figures."""

import gc
import os
import traceback
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench_kit.ranks import Skipped
from gpu_check_parts import disturbances
from gpu_check_parts.models import device_sleep
from gpu_check_parts.training import Job, Recipe, difference, digest, model_values

# Past the iterations of which DDP times every one (the first ten) and past DeAR's own start.
WARM_STEPS = 15
HOST_AHEAD_CYCLES = 1_500_000_000  # some 0.8 s, against some ms that the host needs for a step
RELATIVE_TOLERANCE = 1e-5
# Whoever read the gradients: of torch's clipping and GradScaler the reason gives name and place.
READ_EARLY = "before optimizer.step(), so their updates are not deferred"


def can_communicate(device: torch.device) -> dict[str, Any]:
    """Whether these ranks can talk to each other at all."""
    value = torch.full((1000,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(value)
    expected = sum(range(1, dist.get_world_size() + 1))
    assert bool((value == expected).all()), f"all_reduce gave {value[0].item()}, not {expected}"
    return {}


def equivalence(device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """Train with plain DDP and with DeAR from the same seed: nothing may differ."""
    deterministic()
    expected, _ = _train(recipe, device, with_dear=False)
    seen, stats = _train(recipe, device, with_dear=True)
    return _judge(recipe, seen, expected, stats)


def equivalence_while_tuning(device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """The same, where DeAR may end with plain all-reduces, or leave DDP alone."""
    deterministic()
    expected, _ = _train(recipe, device, with_dear=False)
    job = Job(recipe, device, dist.get_rank(), with_dear=True)
    try:
        seen = job.train()
        largest, stats = judge_bits(recipe, seen, expected), job.state.stats()
        return {
            "largest_difference": largest,
            "pipelined": f"{stats.pipelined_iterations}/{stats.iterations}",
            "digest": digest(seen),
            "noticed": job.state.tuning_progress() if dist.get_rank() == 0 else "",
        }
    finally:
        job.close()


def equivalence_on_side_stream(device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """The same, where the user trains on a stream that is not the default one."""
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return equivalence(device, recipe)


def equivalence_with_late_legs(device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """The same, where gradients come late, legs take long, and the buffer holds other values meanwhile."""
    deterministic()
    expected, _ = _train(recipe, device, with_dear=False)
    with disturbances.late_legs(device, own_shard_is_read="own" in (recipe.clip, recipe.scaler)):
        seen, stats = _train(recipe, device, with_dear=True)
    return _judge(recipe, seen, expected, stats)


def missing_wait_is_noticed(device: torch.device, recipe: Recipe, missing: str) -> dict[str, Any]:
    """Take one wait out of the package: the check above must fail then, or it would prove nothing."""
    deterministic()
    without: AbstractContextManager[None] = getattr(disturbances, missing)(device)
    expected, _ = _train(recipe, device, with_dear=False)
    with disturbances.late_legs(device, own_shard_is_read=False), without:
        seen, _ = _train(recipe, device, with_dear=True)
    _, paths = difference(seen, expected)
    if not paths:
        raise AssertionError(f"{missing}: the result was right all the same, so the checks of late legs prove nothing")
    return {"noticed": f"{len(paths)} values differ, as they must"}


def codes_train_alike(device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """Codes leave something out, so nothing is that of plain DDP; but it is finite, and the same on all ranks."""
    deterministic()
    expected, _ = _train(recipe, device, with_dear=False)
    seen, stats = _train(recipe, device, with_dear=True)
    largest, paths = difference(seen, expected)
    assert paths, "nothing differs from plain DDP, so nothing was coded"
    infinite = [path for path, value in seen.items() if isinstance(value, Tensor) and not value.isfinite().all()]
    assert not infinite, f"not finite: {_some(infinite)}"
    assert not stats.fallbacks, f"fell back: {stats.fallbacks}"
    assert stats.deferred_steps > 0, "no update was deferred"
    return {
        "largest_difference": largest,
        "pipelined": f"{stats.pipelined_iterations}/{stats.iterations}",
        "digest": digest(seen),
    }


def relaxed_ranks_meet(device: torch.device, recipe: Recipe, every: int) -> dict[str, Any]:
    """Ranks that train alone between means have the same finite parameters after one, and wait for none between two."""
    import ddp_crossover as dx  # here, so that plain DDP runs without it

    deterministic()
    job = Job(recipe, device, dist.get_rank(), with_dear=False)
    state = dx.attach(job.ddp, job.optimizer, sync=dx.relaxed.LocalSGD(every=every))
    for index in range(3 * every + 1):
        job.step([job.batch(index)])
    batches = [job.batch(index) for index in range(every - 2)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            job.step([batch])
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    state.consolidate()
    seen = model_values(job.ddp.module)
    assert all(value.isfinite().all() for value in seen.values()), "not finite"
    stats = state.stats()
    assert stats.means >= 2, f"only {stats.means} means in {stats.steps} steps"
    state.detach()
    return {"digest": digest(seen), "noticed": f"{stats.means} means in {stats.steps} steps"}


def dropped_model(device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """Models that are dropped, by each rank at another time, keep no rank from training the next one."""
    deterministic()
    first: Job | None = Job(recipe, device, dist.get_rank(), with_dear=True)
    assert first is not None
    first.train()
    if dist.get_rank() == 0:
        del first
        gc.collect()
    found = equivalence(device, recipe)
    first = None
    gc.collect()
    return found


def no_host_sync(device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """The host blocks nowhere in a steady step: no synchronizing call, and a busy device does not hold it up.

    The second only where the device is this rank's own.
    """
    if blocked := _what_blocks_the_host(recipe, device, with_dear=False):
        raise Skipped(f"plain DDP itself synchronizes here, so this recipe tells nothing: {blocked}")
    if blocked := _what_blocks_the_host(recipe, device, with_dear=True):
        raise AssertionError(f"with DeAR the host waits for the device: {blocked}")
    return {}


def _what_blocks_the_host(recipe: Recipe, device: torch.device, *, with_dear: bool) -> str:
    job = Job(recipe, device, dist.get_rank(), with_dear)
    try:
        batches = [job.batch(place) for place in range(recipe.accumulate)]
        for _ in range(WARM_STEPS):
            job.step(batches)
        torch.cuda.synchronize(device)
        shared = dist.get_world_size() > 1
        return _synchronizing_call(job, batches) or ("" if shared else _waiting_for_busy_device(job, batches))
    finally:
        job.close()


def _synchronizing_call(job: Job, batches: list[Any]) -> str:
    """What torch itself reports. It does not see a wait on an event."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        job.step(batches)
        job.step(batches)  # updates of a step are applied in the forward of the next one
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return _where(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _waiting_for_busy_device(job: Job, batches: list[Any]) -> str:
    """Keep the device busy for long: the host must have enqueued two steps before that ends."""
    torch.cuda.synchronize(job.device)
    device_sleep(job.device, HOST_AHEAD_CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    job.step(batches)
    job.step(batches)
    ahead = not busy.query()
    torch.cuda.synchronize(job.device)
    return "" if ahead else "two steps were enqueued only after the device had become idle"


def _where(error: BaseException) -> str:
    """The message, and the innermost places in Python."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = [f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]
    return f"{error} ({' > '.join(places)})"


def _train(recipe: Recipe, device: torch.device, *, with_dear: bool) -> tuple[dict[str, Any], Any]:
    job = Job(recipe, device, dist.get_rank(), with_dear)
    try:
        return job.train(), job.state.stats() if job.state is not None else None
    finally:
        job.close()


def judge_bits(recipe: Recipe, seen: dict[str, Any], expected: dict[str, Any]) -> float:
    """Raise if anything differs more than the recipe allows; returns the largest difference."""
    largest, paths = difference(seen, expected)
    if not recipe.exact:
        far = [path for path in paths if not _close(seen.get(path), expected.get(path))]
        if far:
            raise AssertionError(f"beyond rtol {RELATIVE_TOLERANCE} of plain DDP: {_some(far)}; largest {largest:g}")
    elif paths:
        raise AssertionError(f"not the bits of plain DDP: {_some(paths)}; largest difference {largest:g}")
    return largest


def _judge(recipe: Recipe, seen: dict[str, Any], expected: dict[str, Any], stats: Any) -> dict[str, Any]:
    largest = judge_bits(recipe, seen, expected)
    unexpected = {
        reason: count
        for reason, count in stats.fallbacks.items()
        if not (recipe.reads_gradients and reason.endswith(READ_EARLY))
    }
    assert not unexpected, f"fell back: {unexpected}"
    assert stats.pipelined_iterations > stats.iterations // 2, (
        f"only {stats.pipelined_iterations} of {stats.iterations} iterations were pipelined"
    )
    if not recipe.reads_gradients:
        assert stats.deferred_steps > 0, "no update was deferred"
    return {
        "largest_difference": largest,
        "pipelined": f"{stats.pipelined_iterations}/{stats.iterations}",
        "deferred_steps": stats.deferred_steps,
        "digest": digest(seen),
    }


def _close(actual: Any, expected: Any) -> bool:
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return False
    return torch.allclose(actual, expected, rtol=RELATIVE_TOLERANCE, atol=1e-6, equal_nan=True)


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def deterministic() -> None:
    """The same kernels in each run."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def on(recipe: Recipe, device_type: str) -> Recipe:
    """The recipe in a size that suits the device."""
    return replace(recipe, model="narrow") if device_type == "cpu" and recipe.model == "wide" else recipe
