"""A table for each case, within 80 columns, and the bar chart. All say that the device is emulated."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from bench_kit.bars import draw_bars
from bench_kit.tables import make_table
from bench_lease_parts.cases import MEANING

_HEADINGS = ("", "over serial", "of S*", "over co-run", "slower", "idle", "Jain", "/s")


def print_case(console: Console, case: dict[str, Any], network: str) -> None:
    """A table with a row for each way to run the jobs."""
    settings = case["settings"]
    console.print()
    console.print(f"[bold]{escape(case['case'])}[/]: {MEANING[case['case']]}", highlight=False)
    for line in _description(case, network):
        console.print(Padding(line, (0, 0, 0, 2)), markup=False, highlight=False)
    caption = f"EMULATED device: sleeps in slices of {settings['slice_s'] * 1e3:g} ms stand in for kernels"
    serial = ["serial", "1.00", f"{1 / case['bound']:.2f}"]
    rows = [serial, *([name, *_cells(arm)] for name, arm in case["arms"].items())]
    console.print(make_table(_HEADINGS, rows, padding=(0, 1, 0, 0), caption=caption, caption_justify="left"))
    for note in _notes(case):
        console.print(Padding(note, (0, 0, 0, 2)), markup=False, highlight=False)


def _description(case: dict[str, Any], network: str) -> list[str]:
    settings = case["settings"]
    jobs = [
        f"{job['name']}: c {_ms(job['compute_s'])}, n {_ms(job['link_s'])}, T {_ms(job['solo_s'])} ms, "
        f"{job['parameters'] / 1e6:.1f} M parameters"
        for job in case["jobs"]
    ]
    return [
        *jobs,
        f"S* = {case['bound']:.2f}; {settings['rounds']} windows of {settings['window_s']:g} s; {network}",
    ]


def _cells(arm: dict[str, Any]) -> list[str]:
    over_serial, over_co_run = arm["over_serial"], arm.get("over_co_run")
    return [
        f"{over_serial['median']:.2f} ({over_serial['low']:.2f}..{over_serial['high']:.2f})",
        f"{arm['of_bound']['median']:.2f}",
        f"{over_co_run['median']:.2f}" if over_co_run else "",
        f"{arm['slower'][0]['median']:+.0%}" if abs(arm["slower"][0]["median"]) >= 0.1 else
        f"{arm['slower'][0]['median']:+.1%}",
        f"{arm['idle_filled']['median']:.0%}",
        f"{arm['jain']['median']:.3f}",
        f"{arm['grants_per_s']['median']:.0f}",
    ]  # fmt: skip


def _notes(case: dict[str, Any]) -> list[str]:
    """Lines below the table."""
    slower = case["solo_slower_with_lease"]
    notes = [
        f"{case['jobs'][0]['name']} alone with its lease on: {slower['median']:+.1%} per step "
        f"({slower['low']:+.1%}..{slower['high']:+.1%})",
        f"a kernel on the idle device takes {case['device_kernel_excess_s'] * 1e6:.0f} us too long, "
        f"a plain sleep {case['sleep_excess_s'] * 1e6:.0f} us",
    ]
    for name, arm in case["arms"].items():
        shares = ", ".join(
            f"{job['name']} {share['median']:.1%}" for job, share in zip(case["jobs"], arm["device_share"], strict=True)
        )
        notes.append(f"{name}: shares of the device time used: {shares}")
        if "waits_given" in arm:
            notes.append(
                f"{name}: of {case['jobs'][0]['name']}'s waits for communication "
                f"{arm['waits_given']['median']:.0%} were given away, {arm['waits_filled']['median']:.0%} used"
            )
        if arm["unleased"]:
            notes.append(f"{name}: {arm['unleased']} turns without the lease")
    return notes


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


COLORS = {"co-run": "tab:gray", "lease": "tab:green"}
WIDTH = 0.45


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG of what `bench_lease.py` writes as JSON, with at least one case."""
    cases = record["cases"]

    def add_bounds(axes: Any) -> None:
        for number, case in enumerate(cases):
            ends, label = [number - WIDTH, number + WIDTH], None if number else "bound S*"
            axes.plot(ends, [case["bound"]] * 2, color="tab:red", label=label)

    title = f"Jobs that share hosts; the device is EMULATED\n{record['configuration']['network']}"
    arms = {name: {number: case["arms"][name]["over_serial"] for number, case in enumerate(cases)} for name in COLORS}
    draw_bars(path, title, "throughput over serial", [case["case"] for case in cases], arms, COLORS, add_bounds)
