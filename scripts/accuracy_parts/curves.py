"""The picture of held-out loss over time, and over samples: two panels for each task. Needs matplotlib."""

from pathlib import Path
from typing import Any

from accuracy_parts.summary import cases_of, held_out, tasks_of
from accuracy_parts.tasks import TASKS
from accuracy_parts.wires import WIRES

PANEL_INCHES = (7.0, 5.0)
# Okabe and Ito's colours, which colour-blind readers can tell apart, in the order of the cases.
COLORS = ["#CC79A7", "#555555", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"]
AXES = {"train_s": "seconds of training", "samples": "samples of all ranks"}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    Args:
        record: what `accuracy.py` writes as JSON with `--evaluate-every`, with at least one case that has trained.
        path: the file.
    """
    # Imported here because it is optional. The object interface leaves the user's backend alone.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    tasks, config = tasks_of(record), record["configuration"]
    width, height = PANEL_INCHES
    figure = Figure(figsize=(2 * width, height * len(tasks)), layout="constrained")
    for row, task in zip(figure.subplots(len(tasks), 2, squeeze=False, sharey="row"), tasks, strict=True):
        for axes, (over, label) in zip(row, AXES.items(), strict=True):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_locator(LogLocator(subs=()))
            axes.set_xlabel(label)
            axes.grid(alpha=0.25, which="both", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            for number, case in enumerate(cases_of(record, task)):
                points = held_out(case)
                x, y = [getattr(point, over) for point in points], [point.test_loss for point in points]
                color, style = COLORS[number % len(COLORS)], "--" if number >= len(COLORS) else "-"
                axes.plot(x, y, style, color=color, linewidth=1.5, label=WIRES[case["wire"]].label)
        row[0].set_ylabel("held-out loss in nats")
        row[0].set_title(TASKS[task].title, loc="left", fontsize="medium")
        row[1].legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    network = config["network"].partition(", fresh")[0]
    seeds = "1 seed" if config["seeds"] == 1 else f"mean of {config['seeds']} seeds"
    figure.suptitle(f"{config['ranks']} ranks: {network}; {seeds}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
