"""The bar chart: throughput over serial of every case, with its bound. Needs matplotlib."""

from pathlib import Path
from typing import Any

from bench_kit.bars import draw_bars

COLORS = {"co-run": "tab:gray", "lease": "tab:green"}
WIDTH = 0.45


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG of what `bench_lease.py` writes as JSON, with at least one case."""
    cases = record["cases"]

    def add_bounds(axes: Any) -> None:
        for number, case in enumerate(cases):
            ends, label = [number - WIDTH, number + WIDTH], None if number else "bound S*"
            axes.plot(ends, [case["bound"]] * 2, color="tab:red", label=label)

    title = f"Jobs that share hosts; the device is EMULATED\n{record['configuration']['network']}"
    arms = {name: {number: case["arms"][name]["over_serial"] for number, case in enumerate(cases)} for name in COLORS}
    draw_bars(path, title, "throughput over serial", [case["case"] for case in cases], arms, COLORS, add_bounds)
