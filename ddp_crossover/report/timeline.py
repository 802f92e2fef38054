"""Draw traces as a picture, one above the other on one time axis.

Draws what Trace.save() wrote, such as a trace of plain DDP and one of DeAR: a row each for forward, backward,
reduce-scatter, all-gather and update, and for the lease where there is one; exposed communication in red. Needs
matplotlib, which pip install ddp_crossover[plot] brings.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ddp_crossover.report.spans import (
    LEG_KINDS,
    WAIT_KINDS,
    Figures,
    Interval,
    Span,
    clip,
    difference,
    exposed,
    intersection,
    union,
    when,
)
from ddp_crossover.report.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

_RED = "#d62728"
_ROW_COLORS = {
    "forward": "#4c78a8",
    "backward": "#2f4b6e",
    "scatter": "#54a24b",
    "gather": "#8cc084",
    "all_reduce": "#54a24b",
    "update": "#b279a2",
}
_LEASE_COLORS = {"held": "#2f4b6e", "gap": "#eeca3b", "lease_wait": "0.7"}
_LEASE_NAMES = {"held": "lease held", "gap": "gap given to another job", "lease_wait": "waiting for the lease"}
_EDGE_COLOR = "0.35"
_ROW_NAMES = {"scatter": "reduce-scatter", "gather": "all-gather", "all_reduce": "all-reduce"}
_BAR_HEIGHT = 0.74  # as a fraction of the row height
_QUEUED_ALPHA = 0.35


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``timeline``."""
    parser.add_argument("traces", nargs="+", metavar="trace.json", help="from top to bottom")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("timeline.png"), help="picture to write (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=2, help="steps to show (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Draw the traces and print a summary; returns the exit status."""
    traces = [Trace.load(name) for name in args.traces]
    draw(traces, args.output, steps=args.steps)
    print(f"{args.output}: " + "; ".join(_headline(trace) for trace in traces))
    return 0


def draw(traces: Sequence[Trace], path: Path, *, steps: int = 2) -> None:
    """Write a picture of ``steps`` consecutive steps of each trace; time zero is the start of the first step shown.

    Of all runs of ``steps`` consecutive steps in a trace, the one with the median duration is shown.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if a trace has fewer complete steps than ``steps``, or matplotlib does not know the suffix of
            ``path``.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib ({error}): pip install ddp_crossover[plot]") from error
    figure = Figure(figsize=(13, height_in(traces, steps=steps)), dpi=130, layout="constrained")
    draw_on(figure, traces, steps=steps)
    figure.savefig(path)


def height_in(traces: Sequence[Trace], *, steps: int = 2) -> float:
    """Inches that a picture of these traces needs."""
    return 1.3 + sum(0.42 * len(_Panel.of(trace, steps).rows) + 0.75 for trace in traces)


def draw_on(figure: FigureBase, traces: Sequence[Trace], *, steps: int = 2) -> None:
    """Draw what :func:`draw` writes on a figure of matplotlib, or a part of one."""
    from matplotlib.patches import Patch

    panels = [_Panel.of(trace, steps) for trace in traces]
    heights = [len(panel.rows) for panel in panels]
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel)
    longest_s = max(panel.window[1] - panel.window[0] for panel in panels)
    all_axes[-1].set_xlim(0, longest_s * 1e3 * 1.005)
    all_axes[-1].set_xlabel("time since the first step shown began (ms)")
    legend = [
        Patch(color=_RED, label="exposed: a leg is under way and nothing is computed"),
        Patch(color=_ROW_COLORS["scatter"], alpha=_QUEUED_ALPHA, label="leg that waits to be sent"),
    ]
    if any(panel.lease for panel in panels):
        legend += [Patch(color=color, label=_LEASE_NAMES[kind]) for kind, color in _LEASE_COLORS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)


class _Panel(NamedTuple):
    """The part of one trace that is shown."""

    headline: str
    rows: list[str]
    spans: list[Span]
    window: Interval
    edges_s: list[float]  # where steps begin or end
    lease: str  # name of the row of the job's lease; empty without a lease

    @classmethod
    def of(cls, trace: Trace, steps: int) -> _Panel:
        if steps < 1:
            raise ValueError(f"--steps is {steps}, and must be at least 1")
        complete = trace.steps()
        if len(complete) < steps:
            raise ValueError(
                f"the trace {trace.title!r} of rank {trace.rank} has {len(complete)} complete steps, not {steps}: "
                "trace one step more than you want to see"
            )
        shown = _typical(complete, steps)
        window = (shown[0].begin_s, shown[-1].end_s)
        spans = trace.spans()
        seen = {span.kind for span in spans if span.begin_s < window[1] and window[0] < span.end_s}
        legs = [kind for kind in LEG_KINDS if kind in seen]
        lease = next((f"lease: {span.detail}" for span in spans if span.kind in _LEASE_COLORS), "")
        rows = ["forward", "backward", *legs, "update", *([lease] if lease else [])]
        return cls(_headline(trace), rows, spans, window, [*(step.begin_s for step in shown), window[1]], lease)


def _typical(steps: list[Figures], count: int) -> list[Figures]:
    """The run of ``count`` consecutive steps whose duration is the median of all such runs."""
    runs = [steps[first : first + count] for first in range(len(steps) - count + 1)]
    runs.sort(key=lambda run: run[-1].end_s - run[0].begin_s)
    return runs[(len(runs) - 1) // 2]


def _headline(trace: Trace) -> str:
    steps = trace.steps()
    if not steps:
        return f"{trace.title}, rank {trace.rank}: no complete step"
    step_s = statistics.median(step.duration_s for step in steps)
    exposed_s = statistics.median(step.exposed_s for step in steps)
    return (
        f"{trace.title}, rank {trace.rank}: {step_s * 1e3:.1f} ms per step, "
        f"{exposed_s * 1e3:.1f} ms of it exposed (medians of {len(steps)} steps)"
    )


def _draw_panel(axes: Axes, panel: _Panel) -> None:
    axes.set_title(panel.headline, loc="left", fontsize=11)
    red = clip(exposed(panel.spans), panel.window)
    for begin_ms, length_ms in _bars(panel, red):
        axes.axvspan(begin_ms, begin_ms + length_ms, color=_RED, alpha=0.12, linewidth=0)
    for row, kind in enumerate(panel.rows):
        if kind in LEG_KINDS:
            sent, of_kind = when(panel.spans, [kind]), [span for span in panel.spans if span.kind == kind]
            queued = union((span.begin_s, span.under_way[0]) for span in of_kind)
            _draw_bars(axes, panel, row, difference(queued, sent), _ROW_COLORS[kind], _QUEUED_ALPHA)
            _draw_bars(axes, panel, row, difference(sent, red), _ROW_COLORS[kind])
            _draw_bars(axes, panel, row, intersection(sent, red), _RED)
        elif kind == panel.lease:
            for state, color in _LEASE_COLORS.items():
                _draw_bars(axes, panel, row, when(panel.spans, [state]), color)
        else:
            _draw_bars(axes, panel, row, _alone(panel.spans, kind), _ROW_COLORS[kind])
    for edge_s in panel.edges_s:
        axes.axvline((edge_s - panel.window[0]) * 1e3, color=_EDGE_COLOR, linewidth=0.9, linestyle="--")
    axes.set_yticks(range(len(panel.rows)), [_ROW_NAMES.get(kind, kind) for kind in panel.rows])
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.tick_params(axis="x", labelbottom=True)


def _alone(spans: list[Span], kind: str) -> list[Interval]:
    """When this kind was computed, without the waits and updates during it."""
    inside = WAIT_KINDS if kind == "update" else (*WAIT_KINDS, "update")
    return difference(when(spans, [kind]), when(spans, inside))


def _draw_bars(axes: Axes, panel: _Panel, row: int, intervals: list[Interval], color: str, alpha: float = 1.0) -> None:
    bars = _bars(panel, intervals)
    axes.broken_barh(bars, (row - _BAR_HEIGHT / 2, _BAR_HEIGHT), facecolors=color, alpha=alpha, linewidth=0)


def _bars(panel: _Panel, intervals: list[Interval]) -> list[tuple[float, float]]:
    """(begin, length) of each visible interval in milliseconds; begin counts from the left edge of the panel."""
    shown = clip(intervals, panel.window)
    return [((begin - panel.window[0]) * 1e3, (end - begin) * 1e3) for begin, end in shown]
