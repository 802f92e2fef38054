"""The table of each case."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from bench_kit.tables import print_table, say

_SPEEDUPS = ("over best DDP", "95%", "25 MB")
_HEADINGS = ("arm", "ms", "quartiles", "T/T*", "over noop", *_SPEEDUPS, "host ms", "MiB", "of DDP's")


def print_case(console: Console, case: dict[str, Any], wire: str) -> None:
    """A table with a row for each arm, or the reason why there is none."""
    console.print()
    console.print(f"[bold]{escape(case['case'])}[/]  ({escape(wire)})", highlight=False)
    measured = case["measured"]
    if not case["arms"]:
        console.print("no round is over", highlight=False)
        return
    say(
        console,
        f"{measured['device']}; {measured['parameters'] / 1e6:.1f} M parameters in {measured['tensors']} tensors. "
        f"A = {case['wire_s'] * 1e3:.1f} ms on the wire, C = {case['compute_s'] * 1e3:.1f} ms of compute, "
        f"A/C = {case['wire_s'] / case['compute_s']:.2f}, T* = max(C, A); {case['rounds']} rounds",
    )
    print_table(console, _HEADINGS, map(_cells, case["arms"]))
    for note in _notes(case):
        say(console, f"  {note}")


def _cells(arm: dict[str, Any]) -> list[str]:
    step_s, over_best, over_default = arm["step_s"], arm["speedup_over_best_ddp"], arm["speedup_over_default_ddp"]
    memory_bytes, memory_ratio = arm["memory_bytes"], arm["memory_over_default_ddp"]
    return [
        arm["arm"],
        f"{step_s['median'] * 1e3:.2f}",
        f"{step_s['low'] * 1e3:.2f}..{step_s['high'] * 1e3:.2f}",
        f"{arm['over_bound']['median']:.3f}",
        f"{arm['over_compute_s']['median'] * 1e3:+.2f}",
        f"{over_best['median']:.2f} ({over_best['low']:.2f}..{over_best['high']:.2f})" if over_best else "",
        f">= {over_best['at_least']:.2f}" if over_best and over_best["at_least"] else "",
        f"{over_default['median']:.2f}" if over_default else "",
        f"{arm['host_s']['median'] * 1e3:.2f}",
        f"{memory_bytes / 2**20:.0f}" if memory_bytes is not None else "",
        f"{memory_ratio:.2f}" if memory_ratio is not None else "",
    ]


def _notes(case: dict[str, Any]) -> list[str]:
    """Lines below the table: what was found and refused, and how steady the sleeps were."""
    measured = case["measured"]
    notes = [f"best bucket size of DDP: {case['best_ddp']}"] if case["best_ddp"] else []
    notes += [f"{name}: {reason}" for name, reason in measured["refused"].items()]
    for arm in case["arms"]:
        if arm.get("tuning"):
            notes.append(f"{arm['arm']}: {arm['tuning']}")
        notes += [f"{arm['arm']}: {times} times {reason}" for reason, times in arm.get("fallbacks", {}).items()]
        if arm["traced_exposed_s"] is not None:
            notes.append(f"{arm['arm']}: {arm['traced_exposed_s'] * 1e3:.2f} ms exposed in a traced step")
    if cycles := measured["cycles_per_s"]:
        notes.append(f"cycles of the sleeping kernel: {min(cycles) / 1e6:.0f} to {max(cycles) / 1e6:.0f} a microsecond")
    notes += [f"{name}: {reason}" for name, reason in case["not_measured"].items()]
    if "timeline" in measured:
        notes.append(f"timeline: {measured['timeline']}")
    return notes
