"""The command line of `bench_shard.py`. Time and memory have options of their own; each refuses those of the other."""

import argparse
import sys

from bench_kit.options import add_results, make_parser, positive_int
from bench_parts.arms import OPTIMIZERS
from bench_parts.options import EPILOG, Defaults, arms, parse_cases

DEFAULTS = Defaults(
    arms=["noop", "ddp", "auto", "shard", "zero", "fsdp2"],
    buckets_mb=[25.0, 4.0, 1.0],
    ratios=[1.0],
    optimizer="adamw",
    swept=("ddp", "zero"),
)
MEMORY_ARMS = [arm for arm in DEFAULTS.arms if arm != "noop"]


def parse_args(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Read and check the command line; bad input ends the program with a message that names it."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(description, EPILOG)
    parser.add_argument(
        "--memory", action="store_true", help="measure memory instead of time; --memory --help lists its options"
    )
    return _parse_memory(parser, given) if "--memory" in given else parse_cases(parser, given, DEFAULTS)


def _parse_memory(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
    # fmt: off
    add = parser.add_argument_group("memory").add_argument
    add("--arms", type=arms, default=MEMORY_ARMS, metavar="ARM,...",
        help=f"listed below; ddp, with buckets of 25 MB, always takes part ({','.join(MEMORY_ARMS)})")
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw",
        help="of all arms; sgd is without momentum (%(default)s)")
    add("--ranks", type=_ranks, default=[2, 4], metavar="N,...", help="numbers of ranks, one after the other (2,4)")
    add("--layers", type=positive_int, default=12, help="blocks of the network (%(default)s)")
    add("--width", type=positive_int, default=1448,
        help="each block is a linear layer of WIDTH x WIDTH and a ReLU (%(default)s: 25 M parameters in 12 blocks)")
    add("--rows", type=positive_int, default=4, help="rows of a batch: few, for small activations (%(default)s)")
    add("--steps", type=positive_int, default=6, help="steps after those that warm up and tune (%(default)s)")
    add("--repeats", type=positive_int, default=3, help="how often each arm is measured, in fresh ranks (%(default)s)")
    # fmt: on
    add_results(parser)
    args = parser.parse_args(given)
    args.arms = list(dict.fromkeys(["ddp", *args.arms]))
    return args


def _ranks(text: str) -> list[int]:
    """An argparse type: comma-separated numbers of ranks."""
    numbers = [int(number) if number.isdecimal() else 0 for number in text.split(",")]
    if min(numbers) < 2:
        raise argparse.ArgumentTypeError(f"{text}: give whole numbers from 2 on; one rank has nothing to shard")
    return list(dict.fromkeys(numbers))
