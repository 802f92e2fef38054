"""The bar chart: T/T* of every arm, in a group for each case. Needs matplotlib."""

from pathlib import Path
from typing import Any

from bench_parts.arms import OURS, ArmName


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    Args:
        record: what `bench.py` writes as JSON, with at least one case.
        path: the file.
    """
    # Imported here because it is optional. The object interface leaves the user's backend alone.
    from matplotlib.figure import Figure

    cases = record["cases"]
    names = list(dict.fromkeys(arm["arm"] for case in cases for arm in case["arms"] if not arm["refused"]))
    colors = _colors(names)
    figure = Figure(figsize=(3 + max(4.0, 0.16 * len(names) * len(cases)), 4.8), layout="constrained")
    axes = figure.add_subplot()
    width = 0.85 / len(names)
    for place, name in enumerate(names):
        measured = [
            (index + (place - (len(names) - 1) / 2) * width, arm["over_bound"])
            for index, case in enumerate(cases)
            for arm in case["arms"]
            if arm["arm"] == name and not arm["refused"]
        ]
        at = [x for x, _ in measured]
        medians = [spread["median"] for _, spread in measured]
        errors = [
            [spread["median"] - spread["low"] for _, spread in measured],
            [spread["high"] - spread["median"] for _, spread in measured],
        ]
        axes.bar(at, medians, width, yerr=errors, color=colors[name], label=name, error_kw={"elinewidth": 0.8})
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(cases)), [_label(case) for case in cases])
    axes.set_ylabel("T/T*, median and quartiles")
    bound = "T* is the longer of compute alone and all-reduce alone"
    axes.set_title(f"Time of a step over T*\n{bound}\n{record['configuration']['network']}", fontsize="medium")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)


def _label(case: dict[str, Any]) -> str:
    name = case["case"].replace(", ", "\n")
    return f"{name}\nT* = {case['bound_s'] * 1e3:.0f} ms"


def _colors(names: list[str]) -> dict[str, Any]:
    """Grey for compute alone, blues for plain DDP, greens for ours, warm ones for the peers."""
    from matplotlib import colormaps

    def family(name: str) -> str:
        kind = ArmName.parse(name).kind
        return "ours" if kind in OURS else kind if kind in ("noop", "ddp") else "peers"

    maps = {"noop": "Greys", "ddp": "Blues", "ours": "Greens", "peers": "YlOrRd"}
    colors = {}
    for group, shades in maps.items():
        members = [name for name in names if family(name) == group]
        for place, name in enumerate(members):
            colors[name] = colormaps[shades](0.85 - 0.5 * place / max(1, len(members)))
    return colors
