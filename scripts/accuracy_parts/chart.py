"""The picture: loss curves of every wire, a panel for each task. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accuracy_parts.summary import cases_of, curve, spread, tasks_of
from accuracy_parts.tasks import FINAL_SHARE, TASKS
from accuracy_parts.wires import WIRES

# Okabe and Ito's colours, which colour-blind readers can tell apart. A wire without error feedback has the colour of
# the one with it, and dashes.
COLORS = {
    "ddp": "#CC79A7", "fp32": "#555555", "bf16": "#56B4E9", "int8": "#0072B2", "int8-noef": "#0072B2",
    "topk": "#D55E00", "topk-noef": "#D55E00", "topk+int8": "#009E73", "unequal": "#E69F00",
    "local-8": "#0072B2", "local-32": "#56B4E9", "local-8-late": "#009E73", "local-8-late-1": "#009E73",
    "local-8-int8": "#CC79A7",
    "local-8-warm": "#0072B2", "local-8-node": "#56B4E9", "local-4-pairs": "#009E73", "local-change": "#CC79A7",
    "daso-8-late": "#009E73", "adasum-1": "#E69F00", "adasum-8": "#E69F00", "late-50": "#777777", "late-100": "#777777",
    "diloco-8": "#D55E00", "diloco-32": "#D55E00",
}  # fmt: skip
# Curves that coincide stay visible, because those that are drawn first are wider.
WIDTHS = {"fp32": 5.0, "ddp": 3.6, "bf16": 2.8}
THIN = 1.3
PANEL_INCHES = (8.2, 5.6)
LABEL_GAP = 0.075
"""Least distance of two labels, as a share of the panel's height."""


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    Args:
        record: what `accuracy.py` writes as JSON, with at least one case that has trained.
        path: the file.
    """
    # Imported here because it is optional. The object interface leaves the user's backend alone.
    from matplotlib.figure import Figure

    tasks, config = tasks_of(record), record["configuration"]
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(tasks), height), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        _draw_panel(axes, task, cases_of(record, task))
    seeds = "1 seed" if config["seeds"] == 1 else f"mean of {config['seeds']} seeds, band: least to greatest"
    figure.suptitle(
        f"Accuracy of {_what(record)}: {config['ranks']} ranks, {seeds}\nbeside each curve: test accuracy, test loss",
        fontsize="medium",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _what(record: dict[str, Any]) -> str:
    is_relaxed = any(WIRES[case["wire"]].is_relaxed for case in record["cases"])
    return "relaxed synchronization" if is_relaxed else "compressed wires"


def _draw_panel(axes: Any, task: str, cases: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(LogLocator(subs=()))
    axes.set_title(TASKS[task].title)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss in nats, running mean over {FINAL_SHARE:.0%} of the steps")
    axes.grid(alpha=0.25, which="both", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    ends = []
    for case in cases:
        line, color = curve(case), COLORS[case["wire"]]
        style = "--" if case["wire"].endswith("-noef") else "-"
        steps, width = range(1, len(line.mean) + 1), WIDTHS.get(case["wire"], THIN)
        axes.plot(steps, line.mean, style, color=color, linewidth=width, alpha=1.0 if width == THIN else 0.5)
        axes.fill_between(steps, line.low, line.high, color=color, alpha=0.12, linewidth=0)
        ends.append((steps[-1], line.mean[-1]))
    axes.set_xlim(0, cases[0]["steps"])
    _keep_the_interesting_range(axes, cases)
    _label(axes, cases, ends)


def _keep_the_interesting_range(axes: Any, cases: Sequence[dict[str, Any]]) -> None:
    """End the axis at twice the first loss: a wire that diverges leaves the panel, and the others stay readable."""
    finite = [loss for case in cases for run in case["runs"] for loss in run["losses"][:1] if loss is not None]
    if finite and axes.get_ylim()[1] > 2 * max(finite):
        axes.set_ylim(top=2 * max(finite))


def _label(axes: Any, cases: Sequence[dict[str, Any]], ends: Sequence[tuple[float, float]]) -> None:
    """Write each wire's name beside the end of its curve, with a thin line where it had to move."""
    to_panel = axes.transData + axes.transAxes.inverted()
    # A wire that diverged has no end: its label stands at the top.
    heights = [to_panel.transform(end)[1] if end[1] == end[1] else 1.0 for end in ends]
    heights = [min(max(height, 0.0), 1.0) for height in heights]
    places = spread_out(heights, LABEL_GAP)
    for case, height, place in zip(cases, heights, places, strict=True):
        accuracy, loss = (spread(case, cases, figure).mean for figure in ("test_accuracy", "test_loss"))
        color = COLORS[case["wire"]]
        text = f"{WIRES[case['wire']].label}\n{accuracy:.1%}, {loss:.3f}"
        axes.plot([1.0, 1.035], [height, place], color=color, linewidth=0.7, transform=axes.transAxes, clip_on=False)
        axes.text(
            1.04, place, text, color=color, transform=axes.transAxes, va="center", fontsize="small", linespacing=1.0
        )


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights apart until neighbours are `gap` away, in their order, within 0 to 1. Pure.

    Runs of labels that touch are moved together, about the middle of where they belong.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    runs: list[list[int]] = []
    for index in order:
        runs.append([index])
        while len(runs) > 1 and _bottom(runs[-1], heights, gap) < _top(runs[-2], heights, gap) + gap:
            last = runs.pop()
            runs[-1] += last
    places = [0.0] * len(heights)
    for run in runs:
        for position, index in enumerate(run):
            places[index] = _bottom(run, heights, gap) + position * gap
    return places


def _bottom(run: Sequence[int], heights: Sequence[float], gap: float) -> float:
    extent = gap * (len(run) - 1)
    middle = sum(heights[index] for index in run) / len(run)
    return max(0.0, min(1.0 - extent, middle - extent / 2))


def _top(run: Sequence[int], heights: Sequence[float], gap: float) -> float:
    return _bottom(run, heights, gap) + gap * (len(run) - 1)
