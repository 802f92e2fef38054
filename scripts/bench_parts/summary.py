"""From the ranks' figures to what is reported: medians, quartiles, the bound, ratios. Pure."""

import dataclasses
import statistics
from typing import Any

import numpy as np

from bench_parts.arms import DEFAULT_BUCKET_MB, ArmName
from bench_parts.settings import CaseSettings


def summarize(settings: CaseSettings, measured: dict[str, Any]) -> dict[str, Any]:
    """One case, as in the JSON file.

    Args:
        settings: the case.
        measured: what `rank.Rank.run` returned.
    """
    rounds_s = {name: np.array(times) for name, times in measured["rounds_s"].items()}
    all_reduce_best_s = min(measured["all_reduces_s"])
    compute_s = float(np.median(rounds_s["noop"]))
    bound_s = max(compute_s, all_reduce_best_s)
    sweep = {name: times for name, times in rounds_s.items() if ArmName.parse(name).kind == "ddp"}
    best = min(sweep, key=lambda name: float(np.median(sweep[name])), default=None)
    default = str(ArmName("ddp", DEFAULT_BUCKET_MB))
    arms = []
    for name in settings.arms:
        arm: dict[str, Any] = {"arm": name, "refused": measured["refused"].get(name)}
        if name in rounds_s:
            arm |= {
                "step_s": spread(rounds_s[name]),
                "over_bound": spread(rounds_s[name] / bound_s),
                "speedup_over_best_ddp": _speedup(sweep.get(best or ""), rounds_s[name]),
                "speedup_over_default_ddp": _speedup(sweep.get(default), rounds_s[name]),
                "warm_up_steps": measured["warm_up_steps"][name],
                "rounds_s": measured["rounds_s"][name],
                **measured["facts"][name],
            }
        arms.append(arm)
    return {
        "case": settings.name,
        "settings": dataclasses.asdict(settings),
        "parameters": measured["parameters"],
        "tensors": measured["tensors"],
        "gradient_bytes": measured["gradient_bytes"],
        "threads_per_rank": measured["threads"],
        "all_reduce_at_start_s": measured["calibration_s"],
        "paced_forward_s_per_layer": measured["forward_s"],
        "all_reduce_best_s": all_reduce_best_s,
        "all_reduce_median_s": statistics.median(measured["all_reduces_s"]),
        "all_reduces_s": measured["all_reduces_s"],
        "compute_s": compute_s,
        "ratio_measured": all_reduce_best_s / compute_s,
        "bound_s": bound_s,
        "best_ddp": best,
        "arms": arms,
    }


def spread(values: np.ndarray) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return {"median": float(median), "low": float(low), "high": float(high)}


def _speedup(reference_s: np.ndarray | None, times_s: np.ndarray) -> dict[str, float] | None:
    """How many times faster than `reference_s`: ratios of the same round, then their median and quartiles."""
    return None if reference_s is None else spread(reference_s / times_s)
