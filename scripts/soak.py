"""Train for long, and see whether anything grows and whether the bits stay those of plain DDP.

    python scripts/soak.py                                     # 50,000 steps, with and without the package
    python scripts/soak.py --steps 2000 --json soak.json       # a first look

Trains a small network on two ranks over loopback: first with the package, its tuner and a lease that another job wants
as well, with evaluations, checkpoints that are saved and loaded, and the package detached and attached anew with other
options; then on the same data without the package. Compares the first quarter of the run with the last one for memory,
threads, descriptors, objects and the time of a step, and parameters and optimizer state bit for bit. Exits with 1 if
anything grew or differs, or a rank failed.
"""

import argparse
import sys

import torch
from rich.console import Console

from bench_kit import record
from bench_kit.display import Display
from bench_kit.launch import CaseFailed, over_loopback
from bench_kit.options import add_results, make_parser
from soak_parts.conduct import ARMS, conduct
from soak_parts.report import print_report
from soak_parts.settings import LEAST_SAMPLES, WORLD_SIZE
from soak_parts.verdict import courses, differences

START_S = 300.0
LONGEST_STEP_S = 2.0  # a step takes 30 to 60 ms on two cores that do nothing else


def main(arguments: list[str] | None = None) -> int:
    """Run a soak; returns 1 if anything grew, differs or failed, else 0."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--steps", type=_steps, default=50_000, help=f"steps of each run, {LEAST_SAMPLES} or more (%(default)s)"
    )
    add_results(parser)
    args = parser.parse_args(arguments)
    configuration = record.configuration(args, torch=torch.__version__, backend="gloo", world_size=WORLD_SIZE)
    record.show_configuration(configuration)
    console = Console()
    try:
        ranks = over_loopback(WORLD_SIZE, START_S + args.steps * LONGEST_STEP_S)
        with ranks as run_ranks, Display(console, len(ARMS)) as display:
            runs, seconds = conduct(args.steps, run_ranks, display.begin, display.update)
    except CaseFailed as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    found = courses(runs["attached"])
    result = {
        "configuration": configuration,
        "runs": runs,
        "seconds": seconds,
        "growing": [f"{course.figure} of {course.process}" for course in found if course.grows],
        "differences": differences(runs["attached"], runs["plain"]),
    }
    print_report(console, found, result)
    record.write(result, args.json)
    return 1 if result["growing"] or result["differences"] else 0


def _steps(text: str) -> int:
    """An argparse type: steps enough for a verdict."""
    if (number := int(text)) < LEAST_SAMPLES:
        raise argparse.ArgumentTypeError(f"{text}: give {LEAST_SAMPLES} or more, so that each quarter has samples")
    return number


if __name__ == "__main__":
    sys.exit(main())
