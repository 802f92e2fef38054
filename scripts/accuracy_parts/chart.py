"""The pictures: training loss of every wire over steps, held-out loss over time and over samples. Need matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accuracy_parts.summary import cases_of, curve, held_out, spread, tasks_of
from accuracy_parts.tasks import FINAL_SHARE, TASKS
from accuracy_parts.wires import WIRES

# Okabe and Ito's colours, which colour-blind readers can tell apart, in the order of the cases; then again, dashed.
COLORS = ["#555555", "#56B4E9", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"]
PANEL_INCHES = (8.2, 5.2)
OVER = {"train_s": "seconds of training", "samples": "samples of all ranks"}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG of training loss, with a panel for each task.

    Args:
        record: what `accuracy.py` writes as JSON, with at least one case that has trained.
        path: the file.
    """
    tasks = tasks_of(record)
    is_relaxed = any(WIRES[case["wire"]].is_relaxed for case in record["cases"])
    what = "relaxed synchronization" if is_relaxed else "compressed wires"
    title = f"Accuracy of {what}: {_ranks(record)}, band: least to greatest\nlegend: test accuracy, test loss"
    figure, (row,) = _panels(title, 1, len(tasks))
    for axes, task in zip(row, tasks, strict=True):
        cases = cases_of(record, task)
        for number, case in enumerate(cases):
            line, color = curve(case), COLORS[number % len(COLORS)]
            steps = range(1, len(line.mean) + 1)
            accuracy, loss = (spread(case, cases, name).mean for name in ("test_accuracy", "test_loss"))
            label = f"{WIRES[case['wire']].label}: {accuracy:.1%}, {loss:.3f}"
            # Curves that coincide stay visible, because those that are drawn first are wider.
            width = max(1.3, 5.0 - 1.2 * number)
            axes.plot(steps, line.mean, _style(number), color=color, linewidth=width, label=label)
            axes.fill_between(steps, line.low, line.high, color=color, alpha=0.12, linewidth=0)
        axes.set_title(TASKS[task].title)
        axes.set_xlabel("step")
        axes.set_ylabel(f"training loss in nats, running mean over {FINAL_SHARE:.0%} of the steps")
        _keep_the_interesting_range(axes, cases)
    _save(figure, row, path)


def draw_held_out(record: dict[str, Any], path: Path) -> None:
    """Write a PNG of held-out loss, with two panels for each task; as `draw`, of a run with `--evaluate-every`."""
    tasks = tasks_of(record)
    network = record["configuration"]["network"].partition(", fresh")[0]
    figure, rows = _panels(f"{_ranks(record)}: {network}", len(tasks), 2, sharey="row")
    for row, task in zip(rows, tasks, strict=True):
        for axes, (over, label) in zip(row, OVER.items(), strict=True):
            for number, case in enumerate(cases_of(record, task)):
                points = held_out(case)
                x, y = [getattr(point, over) for point in points], [point.test_loss for point in points]
                label_of_case, color = WIRES[case["wire"]].label, COLORS[number % len(COLORS)]
                axes.plot(x, y, _style(number), color=color, linewidth=1.5, label=label_of_case)
            axes.set_xlabel(label)
        row[0].set_ylabel("held-out loss in nats")
        row[0].set_title(TASKS[task].title, loc="left", fontsize="medium")
    _save(figure, [row[1] for row in rows], path)


def _ranks(record: dict[str, Any]) -> str:
    config = record["configuration"]
    seeds = "1 seed" if config["seeds"] == 1 else f"mean of {config['seeds']} seeds"
    return f"{config['ranks']} ranks, {seeds}"


def _style(number: int) -> str:
    return "--" if number >= len(COLORS) else "-"


def _panels(title: str, rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """A figure, and its panels row by row, each with a logarithmic axis of losses."""
    # Imported here because it is optional. The object interface leaves the user's backend alone.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in panels.flat:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(LogLocator(subs=()))
        axes.grid(alpha=0.25, which="both", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _keep_the_interesting_range(axes: Any, cases: Sequence[dict[str, Any]]) -> None:
    """End the axis at twice the first loss: a wire that diverges leaves the panel, and the others stay readable."""
    finite = [loss for case in cases for run in case["runs"] for loss in run["losses"][:1] if loss is not None]
    if finite and axes.get_ylim()[1] > 2 * max(finite):
        axes.set_ylim(top=2 * max(finite))


def _save(figure: Any, with_legends: Sequence[Any], path: Path) -> None:
    for axes in with_legends:
        axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
