"""The command line of `bench.py`, and the cases that it asks for."""

import argparse
import dataclasses
from collections.abc import Callable

from bench_kit.options import (
    add_link_options,
    add_results,
    make_parser,
    names,
    parse,
    positive,
    positive_int,
    positive_numbers,
)
from bench_kit.paced import GROWTH
from bench_parts import relaxed
from bench_parts.arms import DEFAULT_BUCKET_MB, KINDS, OPTIMIZERS, ArmName
from bench_parts.cases import CaseSettings, make_workload
from bench_parts.real import MODELS
from bench_parts.stragglers import FORMS, Straggler

ARMS = "\n".join(f"  {name:14}{kind.meaning}" for name, kind in KINDS.items())
EPILOG = f"arms:\n{ARMS}\nWith @MB at its end an arm runs on a DDP with that bucket_cap_mb instead of 25: ddp@4, auto@1"
QUICK = {"rounds": 3, "ratios": [1.0], "buckets": [DEFAULT_BUCKET_MB, 2.0]}
DEFAULT_ARMS = [name for name, kind in KINDS.items() if kind.by_default]


def parse_args(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Read and check the command line; bad input ends the program with a message that names it."""
    parser = make_parser(description, EPILOG)
    _add_what(parser.add_argument_group("what is measured"))
    _add_how(parser.add_argument_group("how"))
    add_results(parser, plot=True)
    args = parse(parser, arguments, QUICK)
    args.arms = _written_out(args.arms, args.buckets)
    for arm in args.arms:
        if (every := relaxed.period(arm)) is not None and args.steps_per_round % every:
            parser.error(f"{arm} shares every {every} steps: give --steps-per-round as a multiple of that")
    try:
        for case in make_cases(args):
            make_workload(case)
    except ValueError as error:
        parser.error(str(error))
    return args


def _add_what(group: argparse._ArgumentGroup) -> None:
    # fmt: off
    add = group.add_argument
    add("--workloads", type=names(["paced", *MODELS]), default=["paced"], metavar="NAME,...",
        help=f"paced, {', '.join(MODELS)} (paced)")
    add("--arms", type=each(ArmName.parse), default=DEFAULT_ARMS, metavar="ARM,...",
        help=f"listed below; noop always takes part ({','.join(DEFAULT_ARMS)})")
    add("--optimizer", choices=list(OPTIMIZERS), default="sgd",
        help="of all arms; sgd is without momentum (%(default)s)")
    add("--buckets", type=positive_numbers, default=[25.0, 8.0, 4.0, 2.0, 1.0], metavar="MB,...",
        help="bucket_cap_mb of ddp, one after the other (25,8,4,2,1)")
    add("--ratios", type=positive_numbers, default=[0.5, 0.8, 1.0, 1.33, 2.0], metavar="A/C,...",
        help="paced: time of all communication over time of all compute (0.5,0.8,1,1.33,2)")
    add("--stragglers", type=each(Straggler.parse), default=[None], metavar="NAME,...", help=f"paced: {FORMS}")
    add("--profile", type=names(list(GROWTH)), default=["uniform"], metavar="NAME,...",
        help="paced: uniform; heavy-end: parameters grow towards the end, as in ResNet (uniform)")
    add("--blocks", type=positive_int, default=8, help="paced: number of blocks (%(default)s)")
    add("--weights-per-block", type=positive_int, default=4, help="paced: weights in each block (%(default)s)")
    add("--parameters", type=positive_int, default=10_000_000, help="paced: elements of all weights (%(default)s)")
    add("--tokens", type=positive_int, default=320,
        help="transformer: tokens of a batch, a multiple of 32 (%(default)s)")
    add("--fusion-mb", type=positive, help="group size of the arms of ddp_crossover (found by the arm itself)")
    # fmt: on


def _add_how(group: argparse._ArgumentGroup) -> None:
    # fmt: off
    add = group.add_argument
    add_link_options(group)
    add("--ranks-per-host", type=positive_int, default=1, help="not shaped between them (%(default)s)")
    add("--slow-nic", metavar="RATE", help="what the last host sends at most")
    add("--delay-ms", type=positive, metavar="MS", help="each packet arrives this much later (no delay)")
    add("--per-connection", metavar="RATE", help="what each TCP connection sends at most, as in clouds (no limit)")
    add("--burst", default="256kb", help="sent at once after a pause, see tc-tbf(8) (%(default)s)")
    add("--latency", default="20ms", help="longest wait in the queue, see tc-tbf(8) (%(default)s)")
    add("--no-lab", action="store_true",
        help="processes over loopback, without root: to try the bench, NOT a measurement of a network")
    add("--rounds", type=positive_int, default=12, help="turns of each arm (%(default)s)")
    add("--steps-per-round", type=positive_int, default=5, help="timed steps of a turn (%(default)s)")
    add("--quick", action="store_true",
        help="a first look: 3 rounds, A/C = 1, buckets of 25 and 2 MB, unless given")
    # fmt: on


def make_cases(args: argparse.Namespace) -> list[CaseSettings]:
    """One case for each workload; of `paced`, one for each profile and ratio."""
    common = CaseSettings(
        workload="paced", arms=tuple(args.arms), rounds=args.rounds, steps=args.steps_per_round, blocks=args.blocks,
        weights_per_block=args.weights_per_block, parameters=args.parameters, tokens=args.tokens,
        fusion_mb=args.fusion_mb, optimizer=args.optimizer,
    )  # fmt: skip
    cases = []
    for workload in args.workloads:
        if workload == "paced":
            cases += [
                dataclasses.replace(common, ratio=ratio, profile=profile, straggler=straggler)
                for profile in args.profile
                for ratio in args.ratios
                for straggler in args.stragglers
            ]
        else:
            cases.append(dataclasses.replace(common, workload=workload))
    return cases


def _written_out(given: list[str], buckets_mb: list[float]) -> list[str]:
    """Arms in their canonical names, each once, `ddp` once for each bucket size, `noop` first."""
    written = ["noop"]
    for arm in given:
        written += [str(ArmName(arm, size)) for size in buckets_mb] if arm == "ddp" else [str(ArmName.parse(arm))]
    return list(dict.fromkeys(written))


def each(parse_one: Callable[[str], object]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated list of what `parse_one` takes, as it was written."""

    def parse_all(text: str) -> list[str]:
        try:
            for name in text.split(","):
                parse_one(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text.split(",")

    return parse_all
