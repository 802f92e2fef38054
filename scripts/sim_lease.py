"""Simulate jobs that share a GPU: without a lease and with one, without MPS and with it. No GPU and no root.

    python scripts/sim_lease.py --check                       # what was measured on an H200, beside what this says
    python scripts/sim_lease.py --models resnet50 --json sim.json

The GPU, hosts, wires and messages are simulated; turns, gaps, predictions, breaks and who is granted the GPU are
decided by the package's own code. Each training job has a wire of its own. docs/lease-bench.md explains the figures.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_kit import record
from bench_kit.options import add_results, make_parser, names, parse, positive_int
from bench_kit.tables import print_table, say
from sim_lease_parts.measure import ARMS, SETTLE_STEPS, Case, measure
from sim_lease_parts.models import MEASURED_MS, MODELS, RATIO_MODEL

JOBS = {"filler": (1, True), "two": (2, False), "three": (3, False)}


def make_cases(args: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    of_models = [(MODELS[name], MEASURED_MS[name] * 1e-3 * 25 / gbit) for name in args.models for gbit in args.gbit]
    of_ratios = [(RATIO_MODEL, RATIO_MODEL.compute_s * ratio) for ratio in args.ratios]
    return [
        Case(model, all_reduce_s, *JOBS[jobs]) for jobs in args.jobs for model, all_reduce_s in of_models + of_ratios
    ]


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = make_parser(__doc__)
    # fmt: off
    add = parser.add_argument
    add("--models", type=names(list(MODELS)), default=list(MODELS), metavar="NAME,...", help="(all)")
    add("--gbit", type=_numbers, default=[25.0, 10.0], metavar="G,...", help="speeds of the wire (25,10)")
    add("--ratios", type=_numbers, default=[1.1, 1.7, 3.0], metavar="A/C,...", help="of an even model; 0: none")
    add("--jobs", type=names(list(JOBS)), default=list(JOBS), metavar="NAME,...", help=f"of {', '.join(JOBS)} (all)")
    add("--rounds", type=positive_int, default=3, help="(%(default)s)")
    add("--window", type=positive_int, default=30, help="length of a window in steps of a job alone (%(default)s)")
    add("--settle", type=positive_int, default=SETTLE_STEPS, help="how long jobs run before, in the same (%(default)s)")
    add("--check", action="store_true", help="only ResNet-50 at 25 Gb/s, beside what was measured")
    add("--quick", action="store_true", help="one round")
    # fmt: on
    add_results(parser)
    args = parse(parser, arguments, {"rounds": 1})
    args.ratios = [ratio for ratio in args.ratios if ratio]
    if args.check:
        args.models, args.gbit, args.ratios, args.jobs = ["resnet50"], [25.0], [], ["filler", "two"]
    return args


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def print_case(console: Console, case: dict[str, Any]) -> None:
    """A table with a row for each way to share."""
    say(console, f"{case['case']}: alone {case['alone_s']['median'] * 1e3:.1f} ms a step, of which C "
                 f"{case['compute_s'] * 1e3:.1f}")  # fmt: skip
    rows = []
    for arm, figures in case["arms"].items():
        row = [arm, *(f"{figures[key]['median']:.2f}" if key in figures else "" for key in _COLUMNS)]
        rows.append(row)
    print_table(console, ("", *_COLUMNS.values()), rows)


_COLUMNS = {
    "main": "first job",
    "together": "training jobs",
    "filler": "filler",
    "idle_filled": "of idle",
}


def main(arguments: list[str] | None = None) -> int:
    """Simulate all cases."""
    args = parse_args(arguments)
    console = Console()
    result: dict[str, Any] = {"configuration": record.configuration(args, arms=list(ARMS)), "cases": []}
    for case in make_cases(args):
        figures = measure(case, args.rounds, args.window, args.settle)
        print_case(console, figures)
        result["cases"].append(figures)
        record.write(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
