"""Check and measure on a GPU what can be known nowhere else, part by part, most important first.

    ddp-crossover gpu-check --list                   # the parts, what each tells, how long each may take
    ddp-crossover gpu-check --part smoke --json gpu.json
    ddp-crossover gpu-check --json gpu.json          # all parts, one after the other
    ddp-crossover gpu-check --only "own clipping"    # cases whose line contains this
    ddp-crossover gpu-check --device cpu             # no GPU needed: rehearses what can run without one

Each part ends in the time that --list shows. The file is written after each case, so a run that is cut short has lost
nothing. Exit code 0 if nothing failed (what is skipped says why), 1 if something failed or there was no time for it, 2
if there is no GPU. See docs/gpu.md.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from rich import box
from rich.console import Console

if importlib.util.find_spec("ddp_crossover") is None:
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # not installed: check this checkout

from bench_kit.options import add_results, make_parser
from bench_kit.tables import print_table
from gpu_check_parts import report
from gpu_check_parts.parts import PARTS
from gpu_check_parts.runner import Runner


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, prog="ddp-crossover gpu-check")
    add = parser.add_argument
    add("--list", action="store_true", help="print the parts and do nothing else")
    add(
        "--part",
        action="append",
        choices=[part.name for part in PARTS],
        metavar="NAME",
        help="run only this part; may be given several times (all)",
    )
    add(
        "--only",
        action="append",
        metavar="TEXT",
        help="only cases whose line, as 'check: name', contains this; may be given several times (all)",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses without a GPU (%(default)s)")
    add("--jobs", type=int, default=3, metavar="N", help="cases side by side, where that is safe (%(default)s)")
    add("--budget-s", type=float, metavar="S", help="seconds for each part, if less than it has anyway")
    add("--timeout-s", type=float, default=90.0, metavar="S", help="seconds for most cases (%(default)g)")
    add_results(parser)
    args = parser.parse_args(arguments)
    if args.jobs < 1 or args.timeout_s <= 0 or (args.budget_s is not None and args.budget_s <= 0):
        parser.error("--jobs, --budget-s and --timeout-s must be greater than 0")
    return args


def print_parts(console: Console) -> None:
    """One line for each part."""
    rows = [(part.name, f"{part.limit_s:.0f}", part.learns) for part in PARTS]
    print_table(console, ("part", "at most s", "tells"), rows, wrapped=("tells",), box=box.SIMPLE_HEAD)


def main(arguments: list[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    args = parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if args.list:
        print_parts(console)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        console.print(
            f"error: torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU, so nothing was checked. Run "
            "this on a machine with an NVIDIA GPU and its driver. --device cpu rehearses what can run without one.",
            style="bold red",
            highlight=False,
        )
        return 2
    about = report.environment(args.device)
    report.print_header(console, about)
    runner = Runner(args, console, about)
    try:
        for part in PARTS:
            if not args.part or part.name in args.part:
                runner.run_part(part)
    finally:
        report.print_results(console, runner.rows, runner.elapsed_s)
        runner.write(ended=True)
    return 1 if runner.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
