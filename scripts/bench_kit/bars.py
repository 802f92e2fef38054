"""The bar chart of a bench: a group for each case, a bar with quartiles for each arm. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_bars(
    path: Path,
    title: str,
    unit: str,
    cases: Sequence[str],
    arms: Mapping[str, Mapping[int, Mapping[str, float]]],
    colors: Mapping[str, Any],
) -> None:
    """Write a PNG, with a line at 1.

    Args:
        path: the file.
        title: above the chart.
        unit: of the bars.
        cases: what is written below each group.
        arms: for each arm its spreads, by the number of the case.
        colors: of each arm.
    """
    # Imported here because it is optional. The object interface leaves the user's backend alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + max(4.0, 0.16 * len(arms) * len(cases)), 4.8), layout="constrained")
    axes = figure.add_subplot()
    width = 0.85 / len(arms)
    for place, (name, spreads) in enumerate(arms.items()):
        at = [case + (place - (len(arms) - 1) / 2) * width for case in spreads]
        medians = [spread["median"] for spread in spreads.values()]
        errors = [
            [spread["median"] - spread["low"] for spread in spreads.values()],
            [spread["high"] - spread["median"] for spread in spreads.values()],
        ]
        axes.bar(at, medians, width, yerr=errors, color=colors[name], label=name, error_kw={"elinewidth": 0.8})
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel(f"{unit}, median and quartiles")
    axes.set_title(title, fontsize="medium")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)
