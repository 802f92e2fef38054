"""The bar chart: T/T* of every arm, in a group for each case. Needs matplotlib."""

from pathlib import Path
from typing import Any

from bench_kit.bars import draw_bars
from bench_parts.arms import KINDS, ArmName


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG of what `bench.py` writes as JSON, with at least one case."""
    cases = record["cases"]
    arms: dict[str, dict[int, dict[str, float]]] = {}
    for number, case in enumerate(cases):
        for arm in case["arms"]:
            if not arm["refused"]:
                arms.setdefault(arm["arm"], {})[number] = arm["over_bound"]
    bound = "T* is the longer of compute alone and all-reduce alone"
    title = f"Time of a step over T*\n{bound}\n{record['configuration']['network']}"
    draw_bars(path, title, "T/T*", [_label(case) for case in cases], arms, _colors(list(arms)))


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
