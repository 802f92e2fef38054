"""Show what a compressed gradient wire costs in accuracy: train with each wire from the same seeds, and compare.

    python scripts/accuracy.py --json accuracy.json --png accuracy.png              # all of it: about 25 minutes
    python scripts/accuracy.py --wires fp32,bf16 --tasks digits --seeds 1           # a first look
    python scripts/accuracy.py --from-json accuracy.json --png accuracy.png         # draw again, train nothing
    sudo python scripts/accuracy.py --rate 100mbit --delay-ms 20 --ranks 4 --evaluate-every 20 --curves curves.png

Ranks are processes of this machine, over gloo; it needs no root and no download. Times say nothing about a network,
unless --rate puts the ranks on hosts of a lab: then held-out loss is shown over time as well as over samples. A wire
that cannot be trained, or leaves ranks with different parameters, is named, and the exit code is 1.
"""

import json
import sys
from typing import Any

from rich.console import Console

from accuracy_parts import chart, measure, report
from accuracy_parts.options import parse_args
from accuracy_parts.summary import tasks_of
from bench_kit import record


def main(arguments: list[str] | None = None) -> int:
    """Train or read, then show; returns 1 if a case failed, else 0."""
    args = parse_args(__doc__, arguments)
    console = Console()

    def write(result: dict[str, Any]) -> None:
        record.write(result, args.json, args.png if tasks_of(result) else None, chart.draw)
        if args.curves and tasks_of(result):
            chart.draw_held_out(result, args.curves)

    if args.from_json:
        result = json.loads(args.from_json.read_text())
        write(result)
    else:
        result = measure.run_all(args, console, on_result=write)
    report.print_tables(console, result)
    return int(any(case["failed"] for case in result["cases"]))


if __name__ == "__main__":
    sys.exit(main())
