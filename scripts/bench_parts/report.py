"""The table of each case."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from bench_kit.tables import print_table, say
from bench_kit.thread_times import COLUMNS

_HEADINGS = ("arm", "ms", "quartiles", "sim", "T/T*", "at best", "over best DDP", "95%", "25 MB", "cpu ms")


def print_case(console: Console, case: dict[str, Any], network: str) -> None:
    """A table with a row for each arm."""
    console.print()
    console.print(f"[bold]{escape(case['case'])}[/]  ({escape(network)})", highlight=False)
    say(
        console,
        f"{case['parameters'] / 1e6:.1f} M parameters in {case['tensors']} tensors. "
        f"A = {case['all_reduce_best_s'] * 1e3:.0f} ms at best (median {case['all_reduce_median_s'] * 1e3:.0f}), "
        f"C = {case['compute_s'] * 1e3:.0f} ms, A/C = {case['ratio_measured']:.2f}, "
        f"T* = max(C, A) = {case['bound_s'] * 1e3:.0f} ms",
    )
    rows = [_cells(arm, case["least_over_bound"]) for arm in case["arms"] if not arm["refused"]]
    print_table(console, _HEADINGS, rows)
    print_table(console, ("cpu ms of", *COLUMNS), [_by_thread(arm) for arm in case["arms"] if not arm["refused"]])
    for note in _notes(case):
        say(console, f"  {note}")


def _cells(arm: dict[str, Any], least_over_bound: float | None) -> list[str]:
    step_s, over_best, over_default = arm["step_s"], arm["speedup_over_best_ddp"], arm["speedup_over_default_ddp"]
    return [
        arm["arm"],
        f"{step_s['median'] * 1e3:.1f}",
        f"{step_s['low'] * 1e3:.0f}..{step_s['high'] * 1e3:.0f}",
        f"{arm['predicted_step_s'] * 1e3:.0f}" if "predicted_step_s" in arm else "",
        f"{arm['over_bound']['median']:.3f}",
        f"{least_over_bound:.3f}" if least_over_bound else "",
        f"{over_best['median']:.2f} ({over_best['low']:.2f}..{over_best['high']:.2f})" if over_best else "",
        f">= {over_best['at_least']:.2f}" if over_best and over_best["at_least"] else "",
        f"{over_default['median']:.2f}" if over_default else "",
        f"{arm['processor_s']['median'] * 1e3:.0f}",
    ]


def _by_thread(arm: dict[str, Any]) -> list[str]:
    return [arm["arm"], *(f"{arm['processor_s_by_thread'][role] * 1e3:.1f}" for role in COLUMNS)]


def _until_settled(arm: dict[str, Any]) -> str:
    """What it took from the making of the network until the figures above."""
    steps, steps_s = arm["warm_up_steps"], arm["warm_up_s"]
    more = steps_s / (steps * arm["step_s"]["median"])
    return f"made in {arm['make_s']:.1f} s, settled after {steps} steps, which took {more:.2f} times as long as since"


def _notes(case: dict[str, Any]) -> list[str]:
    """Lines below the table: refusals, tuning and fallbacks of each arm."""
    notes = [f"best bucket size of DDP: {case['best_ddp']}"] if case["best_ddp"] else []
    for arm in case["arms"]:
        if arm["refused"]:
            notes.append(f"{arm['arm']}: {arm['refused']}")
        if arm.get("tuning"):
            notes.append(f"{arm['arm']}: {arm['tuning']}")
            notes.append(f"{arm['arm']}: {_until_settled(arm)}")
        if arm.get("shares"):
            notes.append(f"{arm['arm']}: samples of ranks: {', '.join(map(str, arm['shares']))}")
        notes += [f"{arm['arm']}: {times} times {reason}" for reason, times in arm.get("fallbacks", {}).items()]
    return notes
