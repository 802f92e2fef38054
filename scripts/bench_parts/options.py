"""The command line of `bench.py`, and the cases that it asks for."""

import argparse
import dataclasses
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

from bench_parts.arms import DEFAULT_BUCKET_MB, MEANING, ArmName
from bench_parts.paced import GROWTH
from bench_parts.real import MODELS
from bench_parts.settings import CaseSettings
from bench_parts.workloads import make_workload

ARMS = "\n".join(f"  {name:14}{meaning}" for name, meaning in MEANING.items())
EPILOG = f"arms:\n{ARMS}\nWith @MB behind it an arm runs on a DDP with that bucket_cap_mb instead of 25: ddp@4, auto@1"


def parse_args(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Read and check the command line; bad input ends the program with a message that names it."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # fmt: off
    what = parser.add_argument_group("what is measured")
    what.add_argument("--workloads", type=names(["paced", *MODELS]), default=["paced"], metavar="NAME,...",
                      help=f"paced, {', '.join(MODELS)} (paced)")
    what.add_argument("--arms", type=_arms, default=list(MEANING), metavar="ARM,...",
                      help="see below; noop always takes part (all)")
    what.add_argument("--buckets", type=_positive_numbers, default=[25.0, 8.0, 4.0, 2.0, 1.0], metavar="MB,...",
                      help="bucket_cap_mb of the arm ddp, one after the other (25,8,4,2,1)")
    what.add_argument("--ratios", type=_positive_numbers, default=[0.5, 0.8, 1.0, 1.33, 2.0], metavar="A/C,...",
                      help="paced: time of all communication over time of all compute (0.5,0.8,1,1.33,2)")
    what.add_argument("--profile", type=names(list(GROWTH)), default=["uniform"], metavar="NAME,...",
                      help="paced: uniform; heavy-end: parameters grow towards the end, as in ResNet (uniform)")
    what.add_argument("--blocks", type=positive_int, default=8, help="paced (%(default)s)")
    what.add_argument("--weights-per-block", type=positive_int, default=4, help="paced (%(default)s)")
    what.add_argument("--parameters", type=positive_int, default=10_000_000, help="paced: in all (%(default)s)")
    what.add_argument("--tokens", type=positive_int, default=320,
                      help="transformer: tokens of a batch, a multiple of 32 (%(default)s)")
    what.add_argument("--fusion-mb", type=float, help="for the arms of ddp_crossover (its own default)")
    how = parser.add_argument_group("how")
    how.add_argument("--hosts", type=int, choices=range(2, 9), default=2, help="(%(default)s)")
    how.add_argument("--rate", default="1gbit", help="each host sends at most so fast; none: no limit (%(default)s)")
    how.add_argument("--burst", default="256kb", help="sent at once after a pause, see tc-tbf(8) (%(default)s)")
    how.add_argument("--latency", default="20ms", help="longest wait in the queue, see tc-tbf(8) (%(default)s)")
    how.add_argument("--no-lab", action="store_true",
                     help="processes over loopback, without root: to try the bench, NOT a measurement of a network")
    how.add_argument("--rounds", type=positive_int, default=12, help="turns of each arm (%(default)s)")
    how.add_argument("--steps-per-round", type=positive_int, default=5, help="timed steps of a turn (%(default)s)")
    how.add_argument("--quick", action="store_true", 
                     help="a first look: 3 rounds, A/C = 1, buckets of 25 and 2 MB, unless given")
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="every figure; written after each case")
    out.add_argument("--plot", type=Path, metavar="FILE", help="bar chart, PNG; needs matplotlib")
    # fmt: on
    if parser.parse_args(arguments).quick:
        parser.set_defaults(rounds=3, ratios=[1.0], buckets=[DEFAULT_BUCKET_MB, 2.0])
    args = parser.parse_args(arguments)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    args.arms = _written_out(args.arms, args.buckets)
    try:
        for case in make_cases(args):
            make_workload(case)
    except ValueError as error:
        parser.error(str(error))
    return args


def make_cases(args: argparse.Namespace) -> list[CaseSettings]:
    """One case for each workload; of `paced`, one for each profile and ratio."""
    common = CaseSettings(
        workload="paced", arms=tuple(args.arms), rounds=args.rounds, steps=args.steps_per_round, blocks=args.blocks,
        weights_per_block=args.weights_per_block, parameters=args.parameters, tokens=args.tokens,
        fusion_mb=args.fusion_mb,
    )  # fmt: skip
    cases = []
    for workload in args.workloads:
        if workload == "paced":
            cases += [
                dataclasses.replace(common, ratio=ratio, profile=profile)
                for profile in args.profile
                for ratio in args.ratios
            ]
        else:
            cases.append(dataclasses.replace(common, workload=workload))
    return cases


def _written_out(arms: list[str], buckets_mb: list[float]) -> list[str]:
    """Arms in their canonical names, each once, `ddp` once for each bucket size, `noop` first."""
    written = ["noop"]
    for arm in arms:
        written += [str(ArmName("ddp", size)) for size in buckets_mb] if arm == "ddp" else [str(ArmName.parse(arm))]
    return list(dict.fromkeys(written))


def names(known: list[str]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated list of known names."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return text.split(",")

    return parse


def _arms(text: str) -> list[str]:
    """An argparse type: a comma-separated list of arms."""
    try:
        return [arm if arm == "ddp" else str(ArmName.parse(arm)) for arm in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive_numbers(text: str) -> list[float]:
    """An argparse type: comma-separated numbers above zero."""
    numbers = [float(number) for number in text.split(",")]
    if not all(number > 0 and math.isfinite(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: give positive numbers")
    return numbers


def positive_int(text: str) -> int:
    """An argparse type: a whole number above zero."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return number
