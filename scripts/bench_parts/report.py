"""What is shown: progress while it runs, a table for each case."""

import time
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PLAIN_LINE_EVERY_S = 15.0


class Display:
    """A context manager: a progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, cases: int) -> None:
        self._console, self._cases, self._case = console, cases, 0
        self._name = ""
        self._last_line = -PLAIN_LINE_EVERY_S
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=cases)

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def begin(self, name: str) -> None:
        """The next case begins."""
        self._case += 1
        self._name = name
        self.update("starting the ranks", 0.0)

    def update(self, doing: str, behind: float) -> None:
        """What the ranks do now, and which share of the case's rounds is behind."""
        text = f"case {self._case} of {self._cases} ({self._name}): {doing}"
        self._bar.update(self._task, description=text, completed=self._case - 1 + behind)
        if not self._console.is_terminal and time.monotonic() - self._last_line > PLAIN_LINE_EVERY_S:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._last_line = time.monotonic()


def print_case(console: Console, case: dict[str, Any], network: str) -> None:
    """A table with a row for each arm."""
    console.print()
    console.print(f"[bold]{escape(case['case'])}[/]  ({escape(network)})", highlight=False)
    console.print(
        f"{case['parameters'] / 1e6:.1f} M parameters in {case['tensors']} tensors. "
        f"A = {case['all_reduce_best_s'] * 1e3:.0f} ms at best (median {case['all_reduce_median_s'] * 1e3:.0f}), "
        f"C = {case['compute_s'] * 1e3:.0f} ms, A/C = {case['ratio_measured']:.2f}, "
        f"T* = max(C, A) = {case['bound_s'] * 1e3:.0f} ms",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE, padding=(0, 1))
    table.add_column("arm", no_wrap=True)
    for heading in ("ms", "quartiles", "sim", "T/T*", "over best DDP", "25 MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in case["arms"]:
        if not arm["refused"]:
            table.add_row(*_cells(arm))
    console.print(table)
    for note in _notes(case):
        console.print(f"  {note}", markup=False, highlight=False, soft_wrap=True)


def _cells(arm: dict[str, Any]) -> list[str]:
    step_s, over_best, over_default = arm["step_s"], arm["speedup_over_best_ddp"], arm["speedup_over_default_ddp"]
    return [
        arm["arm"],
        f"{step_s['median'] * 1e3:.1f}",
        f"{step_s['low'] * 1e3:.0f}..{step_s['high'] * 1e3:.0f}",
        f"{arm['predicted_step_s'] * 1e3:.0f}" if "predicted_step_s" in arm else "",
        f"{arm['over_bound']['median']:.3f}",
        f"{over_best['median']:.2f} ({over_best['low']:.2f}..{over_best['high']:.2f})" if over_best else "",
        f"{over_default['median']:.2f}" if over_default else "",
    ]


def _notes(case: dict[str, Any]) -> list[str]:
    """What the table has no room for."""
    notes = [f"best bucket size of DDP: {case['best_ddp']}"] if case["best_ddp"] else []
    for arm in case["arms"]:
        if arm["refused"]:
            notes.append(f"{arm['arm']}: {arm['refused']}")
        if arm.get("tuning"):
            notes.append(f"{arm['arm']}: {arm['tuning']}")
        notes += [f"{arm['arm']}: {times} times {reason}" for reason, times in arm.get("fallbacks", {}).items()]
    return notes
