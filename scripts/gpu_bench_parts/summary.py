"""Turns the figures of one case into its part of the record: medians, quartiles, ratios within rounds. Pure."""

import dataclasses
import statistics
from typing import Any

from bench_kit.rounds import arm_figures, best_ddp, spread
from gpu_bench_parts.settings import AUTO, DEAR_NO_WIRE, DEFAULT_BUCKET_MB, NOOP, WHY_NOT_FSDP2, CaseSettings


def summarize(settings: CaseSettings, measured: dict[str, Any]) -> dict[str, Any]:
    """One case, as in the JSON file.

    Args:
        settings: the case.
        measured: what `rank.GpuBench.run` yields; there may not have been a round yet.
    """
    case: dict[str, Any] = {
        "case": settings.name,
        "settings": dataclasses.asdict(settings),
        "not_measured": {"fsdp2": WHY_NOT_FSDP2},
        "measured": measured,
        "rounds": len(measured["flat_s"]),
        "arms": [],
    }
    rounds_s = {name: times for name, times in measured["rounds_s"].items() if times}
    # The last round may be under way.
    complete = min((len(times) for times in rounds_s.values()), default=0)
    if NOOP not in rounds_s or not complete:
        return case
    rounds_s = {name: times[:complete] for name, times in rounds_s.items()}
    compute_s, wire_s = statistics.median(rounds_s[NOOP]), statistics.median(measured["flat_s"])
    best = best_ddp(rounds_s) or ""
    return case | {
        "compute_s": compute_s,
        "wire_s": wire_s,
        "bound_s": max(compute_s, wire_s),
        "best_ddp": best,
        "arms": [
            _arm(arm.name, measured, rounds_s, max(compute_s, wire_s), best)
            for arm in settings.arms()
            if arm.name in rounds_s
        ],
    }


def _arm(
    name: str, measured: dict[str, Any], rounds_s: dict[str, list[float]], bound_s: float, best: str
) -> dict[str, Any]:
    default = f"ddp@{DEFAULT_BUCKET_MB:g}"
    memory_bytes = measured["memory_bytes"]
    alone_s = rounds_s[NOOP]
    return arm_figures(name, rounds_s, bound_s, best, default) | {
        "over_compute_s": spread([step_s - alone for step_s, alone in zip(rounds_s[name], alone_s, strict=True)]),
        "host_s": spread(measured["host_s"][name]),
        "traced_exposed_s": measured["traced_exposed_s"].get(name),
        "memory_bytes": memory_bytes.get(name),
        "memory_over_default_ddp": (
            memory_bytes[name] / memory_bytes[default] if name in memory_bytes and memory_bytes.get(default) else None
        ),
        "warm_up_steps": measured["warm_up_steps"][name],
        **measured["facts"][name],
    }


def headline(case: dict[str, Any]) -> str:
    """What the case says, in one sentence."""
    arms = {arm["arm"]: arm for arm in case["arms"]}
    if AUTO not in arms or not case.get("best_ddp"):
        return "no round is over"
    auto = arms[AUTO]
    parts = [
        f"{auto['speedup_over_best_ddp']['median']:.2f} times as fast as {case['best_ddp']}",
        f"T/T* {auto['over_bound']['median']:.2f}, {auto['over_compute_s']['median'] * 1e3:.1f} ms over compute "
        f"(wire {case['wire_s'] * 1e3:.0f} ms)",
    ]
    if DEAR_NO_WIRE in arms:
        parts.append(f"{arms[DEAR_NO_WIRE]['over_compute_s']['median'] * 1e3:+.1f} ms without a wire")
    if auto["left_alone"]:
        parts.append("DDP was left alone")
    return "; ".join(parts)
