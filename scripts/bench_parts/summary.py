"""Turns the ranks' figures into the record: medians, quartiles, the bound, ratios. Pure."""

import dataclasses
import statistics
from typing import Any

from bench_kit.rounds import arm_figures, best_ddp, spread
from bench_parts.arms import DEFAULT_BUCKET_MB, ArmName
from bench_parts.cases import CaseSettings
from bench_parts.prediction import least_case_step_s
from ddp_crossover.plan.model_profile import ModelProfile


def summarize(settings: CaseSettings, measured: dict[str, Any]) -> dict[str, Any]:
    """One case, as in the JSON file.

    Args:
        settings: the case.
        measured: what `rank.Rank.run` returned.
    """
    rounds_s, all_reduces_s = measured["rounds_s"], measured["case"]["all_reduces_s"]
    all_reduce_best_s = min(all_reduces_s)
    compute_s = statistics.median(rounds_s["noop"])
    bound_s = max(compute_s, all_reduce_best_s)
    profile = measured["profile"]
    least_s = least_case_step_s(ModelProfile.from_json(profile), compute_s, all_reduce_best_s) if profile else None
    best, default = best_ddp(rounds_s), str(ArmName("ddp", DEFAULT_BUCKET_MB))
    return {
        "case": settings.name,
        "settings": dataclasses.asdict(settings),
        **measured["case"],
        "all_reduce_best_s": all_reduce_best_s,
        "all_reduce_median_s": statistics.median(all_reduces_s),
        "compute_s": compute_s,
        "ratio_measured": all_reduce_best_s / compute_s,
        "bound_s": bound_s,
        "least_step_s": least_s,
        "least_over_bound": least_s / bound_s if least_s else None,
        "best_ddp": best,
        "arms": [_arm(name, measured, bound_s, best, default) for name in settings.arms],
    }


def _arm(name: str, measured: dict[str, Any], bound_s: float, best: str | None, default: str) -> dict[str, Any]:
    """One arm's part; the last two name DDP at its best and at its default bucket size."""
    if name not in measured["rounds_s"]:
        return {"arm": name, "refused": measured["refused"].get(name)}
    by_role = measured["processor_s"][name]
    return arm_figures(name, measured["rounds_s"], bound_s, best, default) | {
        "refused": None,
        "warm_up_steps": measured["warm_up_steps"][name],
        "make_s": measured["make_s"][name],
        "warm_up_s": measured["warm_up_s"][name],
        "rounds_s": measured["rounds_s"][name],
        "processor_s": spread([sum(step) for step in zip(*by_role.values(), strict=True)]),
        "processor_s_by_thread": {role: statistics.median(rounds) for role, rounds in by_role.items()},
        "sent_bytes": spread(measured["sent_bytes"][name]) if name in measured["sent_bytes"] else None,
        **measured["facts"][name],
    }
