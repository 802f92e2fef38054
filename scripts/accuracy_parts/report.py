"""The table of each task. It fits a terminal of 100 columns."""

from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape

from accuracy_parts.summary import FIGURES, Spread, cases_of, first_with, held_out, spread, tasks_of
from accuracy_parts.tasks import FINAL_SHARE, TASKS
from accuracy_parts.wires import REFERENCE
from bench_kit.tables import print_table

LOSS_FACTORS = (1.2, 1.05)
_PERCENT = {"test_accuracy"}


def print_tables(console: Console, record: dict[str, Any]) -> None:
    """A table for each task, with a row for each wire."""
    config = record["configuration"]
    for task in tasks_of(record):
        cases = cases_of(record, task)
        title = f"{TASKS[task].title}: {cases[0]['steps']} steps; ranks: {config['ranks']}, seeds: {config['seeds']}"
        console.print(f"\n[bold]{escape(title)}[/]", highlight=False, soft_wrap=True)
        _print_figures(console, cases)
        if any(map(held_out, cases)):
            _print_held_out(console, cases)
    for case in record["cases"]:
        if case["failed"]:
            console.print(f"  {case['task']}, {case['wire']}: failed", markup=False, highlight=False)
    console.print(
        f"  Mean over seeds, and below it the least and the greatest. to {REFERENCE}: the mean difference with the "
        f"same seed. train loss: mean over the last {FINAL_SHARE:.0%} of the steps. MB sent: by a rank in a "
        "pipelined step, without headers",
        markup=False,
        highlight=False,
    )


def _print_held_out(console: Console, cases: list[dict[str, Any]]) -> None:
    """What each wire needs to come near the loss that the reference ends with."""
    curves = {case["wire"]: held_out(case) for case in cases}
    end = curves.get(REFERENCE, next(iter(curves.values())))[-1].test_loss
    losses, rows = [factor * end for factor in LOSS_FACTORS], []
    for case in cases:
        points, cells = curves[case["wire"]], []
        for loss in losses:
            found = first_with(points, loss)
            cells += ["", ""] if found is None else [f"{found.train_s:.1f}", f"{found.samples:.0f}"]
        step_ms = 1e3 * points[-1].train_s / case["steps"]
        rows.append([case["wire"], f"{step_ms:.0f}", f"{points[-1].test_loss:.3f}", *cells])
    of_losses = [heading for loss in losses for heading in (f"s to {loss:.3f}", "samples")]
    print_table(console, ["wire", "ms a step", "loss at the end", *of_losses], rows)
    console.print(
        f"  Held-out loss of the mean over ranks. Losses are {' and '.join(f'{f:g}' for f in LOSS_FACTORS)} times that "
        f"with which {REFERENCE if REFERENCE in curves else cases[0]['wire']} ends\n",
        markup=False,
        highlight=False,
    )


def _print_figures(console: Console, cases: list[dict[str, Any]]) -> None:
    to_reference = f"to {REFERENCE}"
    headings = ["train loss", to_reference, "test loss", to_reference, "accuracy %", to_reference]
    rows = [
        [
            case["wire"],
            *(cell for figure in FIGURES for cell in _cells(spread(case, cases, figure), figure in _PERCENT)),
            _megabytes(case),
        ]
        for case in cases
    ]
    print_table(console, ["wire", *headings, "MB sent"], rows)


def _cells(figure: Spread, is_percent: bool) -> tuple[str, str]:
    scale, digits = (100, 1) if is_percent else (1, 3)
    mean, low, high = (f"{scale * value:.{digits}f}" for value in figure[:3])
    if figure.to_reference is None:
        return f"{mean}\n{low}..{high}", ""
    difference = round(scale * figure.to_reference, digits) + 0.0  # without the sum, what rounds to zero may be -0.0
    return f"{mean}\n{low}..{high}", f"{difference:+.{digits}f}"


def _megabytes(case: dict[str, Any]) -> str:
    sent_bytes = [run["sent_bytes_per_step"] for run in case["runs"] if run.get("sent_bytes_per_step")]
    return f"{median(sent_bytes) / 1e6:.3f}" if sent_bytes else ""
