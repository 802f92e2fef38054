"""The bar chart: T/T* of every arm, in a group for each case, with quartiles. Needs matplotlib."""

from pathlib import Path
from typing import Any

from bench_parts.arms import KINDS, ArmName


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG of what `bench.py` writes as JSON, with at least one case, and with a line at 1."""
    # Imported here because it is optional. The object interface leaves the user's backend alone.
    from matplotlib.figure import Figure

    cases = record["cases"]
    arms: dict[str, dict[int, dict[str, float]]] = {}
    for number, case in enumerate(cases):
        for arm in case["arms"]:
            if not arm["refused"]:
                arms.setdefault(arm["arm"], {})[number] = arm["over_bound"]
    figure = Figure(figsize=(3 + max(4.0, 0.16 * len(arms) * len(cases)), 4.8), layout="constrained")
    axes = figure.add_subplot()
    width, colors = 0.85 / len(arms), _colors(list(arms))
    for place, (name, spreads) in enumerate(arms.items()):
        at = [case + (place - (len(arms) - 1) / 2) * width for case in spreads]
        medians = [spread["median"] for spread in spreads.values()]
        errors = [
            [spread["median"] - spread["low"] for spread in spreads.values()],
            [spread["high"] - spread["median"] for spread in spreads.values()],
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
        return "ours" if KINDS[kind].options else kind if kind in ("noop", "ddp") else "peers"

    maps = {"noop": "Greys", "ddp": "Blues", "ours": "Greens", "peers": "YlOrRd"}
    colors = {}
    for group, shades in maps.items():
        members = [name for name in names if family(name) == group]
        for place, name in enumerate(members):
            colors[name] = colormaps[shades](0.85 - 0.5 * place / max(1, len(members)))
    return colors
