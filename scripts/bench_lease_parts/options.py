"""The command line of `bench_lease.py`."""

import argparse

from bench_kit.options import (
    add_link_options,
    add_results,
    make_parser,
    names,
    not_negative,
    parse,
    positive,
    positive_int,
)
from bench_lease_parts.cases import JOBS, MEANING

CASES = "\n".join(f"  {name:10}{meaning}" for name, meaning in MEANING.items())


def parse_args(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Read and check the command line; bad input ends the program with a message that names it."""
    parser = make_parser(description, f"cases:\n{CASES}")
    # fmt: off
    what = parser.add_argument_group("what is measured")
    what.add_argument("--cases", type=names(list(JOBS)), default=list(JOBS), metavar="NAME,...",
                      help="listed below (all)")
    what.add_argument("--schedule", choices=("dear", "auto", "allreduce"), default="dear",
                      help="schedule of the training jobs (%(default)s)")
    what.add_argument("--slice-ms", type=positive, default=2.0,
                      help="time slice of the emulated device (%(default)g)")
    what.add_argument("--switch-us", type=not_negative, default=0.0,
                      help="time that the emulated device loses when it goes from one job to another (%(default)g)")
    how = parser.add_argument_group("how")
    add_link_options(how)
    how.add_argument("--rounds", type=positive_int, default=5, help="windows of each arm (%(default)s)")
    how.add_argument("--window-s", type=positive, default=8.0, help="length of a window (%(default)g)")
    how.add_argument("--settle-s", type=positive, default=1.5,
                     help="how long jobs run before a window begins (%(default)g)")
    how.add_argument("--quick", action="store_true", help="a first look: 2 rounds of 4 s, unless given")
    # fmt: on
    add_results(parser, plot=True)
    return parse(parser, arguments, {"rounds": 2, "window_s": 4.0})
