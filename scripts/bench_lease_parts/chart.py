"""The bar chart: throughput over serial of every case, with its bound. Needs matplotlib."""

from pathlib import Path
from typing import Any

COLORS = {"co-run": "tab:gray", "lease": "tab:green"}
WIDTH = 0.36


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    Args:
        record: what `bench_lease.py` writes as JSON, with at least one case.
        path: the file.
    """
    # Imported here because it is optional. The object interface leaves the user's backend alone.
    from matplotlib.figure import Figure

    cases = record["cases"]
    figure = Figure(figsize=(3 + 1.5 * len(cases), 4.8), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, color) in enumerate(COLORS.items()):
        spreads = [case["arms"][name]["over_serial"] for case in cases]
        errors = [
            [spread["median"] - spread["low"] for spread in spreads],
            [spread["high"] - spread["median"] for spread in spreads],
        ]
        at = [index + (place - 0.5) * WIDTH for index in range(len(cases))]
        medians = [spread["median"] for spread in spreads]
        axes.bar(at, medians, WIDTH, yerr=errors, color=color, label=name, error_kw={"elinewidth": 0.8})
        for x, median in zip(at, medians, strict=True):
            axes.annotate(f"{median:.2f}", (x, 0.02), ha="center", color="white", fontsize="small")
    for index, case in enumerate(cases):
        axes.plot(
            [index - WIDTH, index + WIDTH], [case["bound"]] * 2, color="tab:red", label=None if index else "bound S*"
        )
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="serial")
    axes.set_xticks(range(len(cases)), [case["case"] for case in cases])
    axes.set_ylabel("throughput over serial, median and quartiles")
    axes.set_title(f"Jobs that share hosts; the device is EMULATED\n{record['configuration']['network']}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)
