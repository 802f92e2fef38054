"""What the command lines of the benches share: how they look, types of arguments, where results go."""

import argparse
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_parser(
    description: str | None, epilog: str | None = None, *, prog: str | None = None
) -> argparse.ArgumentParser:
    """A parser whose help begins with the script's docstring, with its lines as they are. `prog`: if not the file."""
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_link_options(parser: argparse._ActionsContainer) -> None:
    """The hosts of a lab and what each of them may send."""
    parser.add_argument("--hosts", type=int, choices=range(2, 9), default=2, help="(%(default)s)")
    parser.add_argument(
        "--rate", default="1gbit", help="each host sends at most this fast; none: no limit (%(default)s)"
    )


def add_results(parser: argparse.ArgumentParser, *, plot: bool = False) -> None:
    """`--json`, and `--plot` where the bench can draw."""
    group = parser.add_argument_group("results")
    when = "; written after each case" if plot else ""
    group.add_argument("--json", type=Path, metavar="FILE", help=f"file for all figures{when}")
    if plot:
        group.add_argument("--plot", type=Path, metavar="FILE", help="file for a bar chart, PNG; needs matplotlib")


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None, quick: dict[str, Any]) -> argparse.Namespace:
    """Read the command line. With `--quick`, the values of `quick` hold for what is not given."""
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**quick)
    args = parser.parse_args(arguments)
    if getattr(args, "plot", None) and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return args


def names(known: list[str]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated list of known names."""

    def parse_names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return text.split(",")

    return parse_names


def positive_int(text: str) -> int:
    """An argparse type: a whole number above zero."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return number


def positive(text: str) -> float:
    """An argparse type: a number above zero."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return number


def not_negative(text: str) -> float:
    """An argparse type: zero or a number above it."""
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give 0 or more")
    return number


def positive_numbers(text: str) -> list[float]:
    """An argparse type: comma-separated numbers above zero."""
    numbers = [float(number) for number in text.split(",")]
    if not all(0 < number < math.inf for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: give numbers above 0")
    return numbers
