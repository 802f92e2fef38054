"""The tables: times of each case, and the memory of all arms. They fit a terminal of 100 columns."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bench_parts.report import print_heading, print_notes
from bench_shard_parts.ratios import REFERENCES

_WIDTH = 100
_MIB = 2**20


def print_times(console: Console, case: dict[str, Any], network: str) -> None:
    """A table with a row for each arm."""
    print_heading(console, case, network)
    _print_table(
        console,
        ["arm", "ms", "quartiles", "T/T*", *(text for name in REFERENCES for text in (f"x {name}", "95%")), "MB sent"],
        [_times(arm) for arm in case["arms"] if not arm["refused"]],
    )
    print_notes(console, case)
    all_reduce_bytes = 2 * (case["hosts"] - 1) / case["hosts"] * case["gradient_bytes"]
    _say(
        console,
        f"best bucket size of ZeRO: {case['best_zero']}" if case["best_zero"] else "",
        "x auto, x shard: step time over that of auto, of shard in the same round, with quartiles; 95%: the median is "
        "at least that, with 95% confidence. MB sent: by each host in a step, with headers; one all-reduce of all "
        f"gradients sends {all_reduce_bytes / 1e6:.1f} without",
    )


def _times(arm: dict[str, Any]) -> list[str]:
    step_s, sent_bytes = arm["step_s"], arm["sent_bytes"]
    return [
        arm["arm"],
        f"{step_s['median'] * 1e3:.1f}",
        f"{step_s['low'] * 1e3:.0f}..{step_s['high'] * 1e3:.0f}",
        f"{arm['over_bound']['median']:.3f}",
        *(cell for name in REFERENCES for cell in _over(arm["over"][name])),
        f"{sent_bytes['median'] / 1e6:.1f}" if sent_bytes else "",
    ]


def _over(ratios: dict[str, float | None] | None) -> tuple[str, str]:
    if ratios is None:
        return "", ""
    at_least = ratios["at_least"]
    spread = f"{ratios['median']:.2f} ({ratios['low']:.2f}..{ratios['high']:.2f})"
    return spread, "" if at_least is None else f"{at_least:.2f}"


def print_memory(console: Console, cases: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """A table with a row for each number of ranks and each arm."""
    console.print()
    title = f"{config['parameters'] / 1e6:.1f} M fp32 parameters, {config['optimizer']}"
    console.print(f"[bold]{escape(title)}[/]  ({escape(config['network'])})", highlight=False, soft_wrap=True)
    _print_table(
        console,
        ["ranks", "arm", "optimizer", "of all", "RSS", "to ddp", "peak RSS", "to ddp"],
        [_memory(case) for case in cases if case["repeats"]],
        left=2,
    )
    refused = [f"{case['arm']} on {case['ranks']} ranks: {case['refused']}" for case in cases if case["refused"]]
    ours = {f"{case['arm']} on {case['ranks']} ranks": case["repeats"][-1][0] for case in cases if case["repeats"]}
    _say(
        console,
        *refused,
        *(f"{name}: {figures['tuning']}" for name, figures in ours.items() if figures.get("tuning")),
        "MiB on the rank that holds most: median, and range over repeats. optimizer: its state, and the share of that "
        "of ddp. RSS after the last step, and its peak in training, beyond RSS before the network was made",
    )


def _memory(case: dict[str, Any]) -> list[str]:
    share, beyond = case["state_share"], case["beyond_ddp"]
    return [
        str(case["ranks"]),
        case["arm"],
        f"{case['optimizer_state_bytes']['median'] / _MIB:.1f}",
        "" if share is None else f"{share:.3f}",
        *(
            cell
            for figure in ("rss_bytes", "peak_rss_bytes")
            for cell in (_mib(case[figure]), f"{beyond[figure] / _MIB:+.0f}")
        ),
    ]


def _mib(spread: dict[str, float]) -> str:
    return f"{spread['median'] / _MIB:.0f} ({spread['low'] / _MIB:.0f}..{spread['high'] / _MIB:.0f})"


def _print_table(console: Console, headings: list[str], rows: list[list[str]], left: int = 1) -> None:
    """Columns are right-aligned, except for so many on the left."""
    table = Table(box=box.SIMPLE, padding=(0, 1))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Wide enough for all figures, also where the output is no terminal and rich assumes 80 columns.
    console.print(table, width=max(console.width, _WIDTH), crop=False)


def _say(console: Console, *lines: str) -> None:
    for line in filter(None, lines):
        console.print(Padding(Text(line), (0, 0, 0, 2)))
