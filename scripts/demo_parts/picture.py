"""The picture of the demo: how long a step takes with each arm, and below, where there are traces, what fills it."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure, FigureBase

from ddp_crossover import Trace
from ddp_crossover.report import timeline

WIDTH_IN = 13.0
BAR_IN = 0.55
COLORS = ("#9aa5b1", "#5d7389", "#54a24b", "#d9dee3")  # DDP, DDP at its best, this; compute alone


def draw(rows: list[dict[str, Any]], how: str, traces: list[Trace], path: Path) -> None:
    """Write the picture.

    Args:
        rows: of `report.rows`.
        how: what the lines at the ends of bars are.
        traces: of this rank; may be empty.
        path: PNG.
    """
    bars_in = 1.2 + BAR_IN * len(rows)
    traces_in = timeline.height_in(traces) if traces else 0.0
    figure = Figure(figsize=(WIDTH_IN, bars_in + traces_in), dpi=130, layout="constrained")
    if traces:
        parts: Any = figure.subfigures(2, 1, height_ratios=[bars_in, traces_in])
        above, below = parts
        timeline.draw_on(below, traces)
        _draw_bars(above, rows, how)
    else:
        _draw_bars(figure, rows, how)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_bars(figure: FigureBase, rows: list[dict[str, Any]], how: str) -> None:
    axes = figure.subplots()
    axes.set_title(f"Time of a training step ({how})", loc="left", fontsize=11)
    colors = [*COLORS[: len(rows) - 2], *COLORS[2:]]
    furthest_ms = 0.0
    for place, (row, color) in enumerate(zip(rows, colors, strict=True)):
        median, low, high = (1e3 * row["step_s"][key] for key in ("median", "low", "high"))
        axes.barh(place, median, height=0.72, color=color)
        axes.plot([low, high], [place, place], color="black", linewidth=1.4, marker="|", markersize=9)
        axes.text(high, place, f"   {median:.0f} ms{_gain(row)}", va="center")
        furthest_ms = max(furthest_ms, high)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, furthest_ms * 1.6)  # room for the words
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)


def _gain(row: dict[str, Any]) -> str:
    speedup = row.get("speedup")
    if speedup is None or speedup["low"] == speedup["high"] == 1.0:
        return ""
    return f"  ({speedup['median']:.2f} times as fast as the best DDP: {speedup['low']:.2f} to {speedup['high']:.2f})"
