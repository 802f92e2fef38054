"""The command line of `bench_lease.py`."""

import argparse
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

from bench_parts.options import names, positive_int
from bench_lease_parts.cases import JOBS, MEANING

CASES = "\n".join(f"  {name:10}{meaning}" for name, meaning in MEANING.items())


def parse_args(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Read and check the command line; bad input ends the program with a message that names it."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"cases:\n{CASES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # fmt: off
    what = parser.add_argument_group("what is measured")
    what.add_argument("--cases", type=names(list(JOBS)), default=list(JOBS), metavar="NAME,...",
                      help="see below (all)")
    what.add_argument("--schedule", choices=("dear", "auto", "allreduce"), default="dear",
                      help="of the training jobs (%(default)s)")
    what.add_argument("--slice-ms", type=_number(above=0), default=2.0,
                      help="time slice of the emulated device (%(default)g)")
    what.add_argument("--switch-us", type=_number(at_least=0), default=0.0,
                      help="what it costs the emulated device to go from one job to another (%(default)g)")
    how = parser.add_argument_group("how")
    how.add_argument("--hosts", type=int, choices=range(2, 9), default=2, help="(%(default)s)")
    how.add_argument("--rate", default="1gbit", help="each host sends at most so fast; none: no limit (%(default)s)")
    how.add_argument("--rounds", type=positive_int, default=5, help="windows of each arm (%(default)s)")
    how.add_argument("--window-s", type=_number(above=0), default=8.0, help="length of a window (%(default)g)")
    how.add_argument("--settle-s", type=_number(above=0), default=1.5,
                     help="how long jobs run before a window begins (%(default)g)")
    how.add_argument("--quick", action="store_true", help="a first look: 2 rounds of 4 s, unless given")
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="every figure; written after each case")
    out.add_argument("--plot", type=Path, metavar="FILE", help="bar chart, PNG; needs matplotlib")
    # fmt: on
    if parser.parse_args(arguments).quick:
        parser.set_defaults(rounds=2, window_s=4.0)
    args = parser.parse_args(arguments)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return args


def _number(above: float = -math.inf, at_least: float = -math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = float(text)
        if not (above < number < math.inf and number >= at_least):
            raise argparse.ArgumentTypeError(f"{text}: give a number above {max(above, at_least):g}")
        return number

    return parse
