"""DeAR against plain DDP and its peers on a slow network, built on this machine.

    sudo python scripts/bench.py --quick                        # a first look, a few minutes
    sudo python scripts/bench.py --json bench.json --plot bench.png
    sudo python scripts/bench.py --workloads transformer,resnet50 --arms noop,ddp,auto --rounds 20
    python scripts/bench.py --no-lab --quick                    # without root; no network, so no measurement of one

Each case (a workload, and for paced layers a ratio A/C) runs on all hosts of the lab, with all arms in
the same processes: in each round every arm takes a turn of a few steps. docs/bench.md says what the figures mean.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench_lab import report
from bench_lab.arms import DEFAULT_BUCKET_MB, MEANING, ArmName
from bench_lab.launch import CaseFailed, RunRanks, on_hosts, over_loopback, run_case
from bench_lab.real import MODELS
from bench_lab.settings import CaseSettings
from bench_lab.summary import summarize
from lab import Lab, LabError

REFUSED_EXIT_CODE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run all cases; 2 if the lab cannot be built, 1 if a case failed."""
    args = parse_args(arguments)
    console = Console()
    cases = make_cases(args)
    record: dict[str, Any] = {"configuration": configuration(args), "cases": []}
    console.print("  ".join(f"{key}={value}" for key, value in record["configuration"].items()), highlight=False)
    try:
        with network(args) as run_ranks, report.Display(console, len(cases)) as display:
            for settings in cases:
                display.begin(settings.name)
                case = summarize(settings, run_case(settings, run_ranks, display.update))
                report.print_case(console, case, record["configuration"]["network"])
                record["cases"].append(case)
                write(args, record)
    except LabError as error:
        print(f"bench: {error}. Without a lab: --no-lab", file=sys.stderr)
        return REFUSED_EXIT_CODE
    except CaseFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def network(args: argparse.Namespace) -> Iterator[RunRanks]:
    """What runs the ranks, while it exists."""
    if args.no_lab:
        yield over_loopback(args.hosts)
        return
    rate = None if args.rate == "none" else args.rate
    with Lab(args.hosts, rate=rate, burst=args.burst, latency=args.latency) as lab:
        yield on_hosts(lab)


def make_cases(args: argparse.Namespace) -> list[CaseSettings]:
    """One for each workload, for `paced` one for each profile and ratio."""
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


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the figures depend on."""
    shaped = f"{args.hosts} hosts, {args.rate} each way, burst {args.burst}, latency {args.latency}"
    return {
        "network": f"loopback, {args.hosts} processes: NOT a measurement of a network" if args.no_lab else shaped,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "backend": "gloo",
        "all_arms_share": "SGD, gradient_as_bucket_view=True, 1 thread per rank",
    } | {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def processor_name() -> str:
    """The model name that Linux knows, else what Python says."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def write(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write the files asked for. After each case, so that a long run that breaks off leaves what it has."""
    for path in filter(None, (args.json, args.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=2) + "\n")


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Read and check the command line."""
    arms = "arms:\n" + "\n".join(f"  {name:14}{meaning}" for name, meaning in MEANING.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=arms + "\nan arm may be followed by @MB, the bucket_cap_mb of its DDP (25): ddp@4, auto@1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # fmt: off
    what = parser.add_argument_group("what is measured")
    what.add_argument("--workloads", type=names(["paced", *MODELS]), default=["paced"], metavar="NAME,...",
                      help=f"paced, {', '.join(MODELS)} (paced)")
    what.add_argument("--arms", type=arm_names, default=list(MEANING), metavar="ARM,...",
                      help="see below; noop always takes part (all)")
    what.add_argument("--buckets", type=positive_numbers, default=[25.0, 8.0, 4.0, 2.0, 1.0], metavar="MB,...",
                      help="bucket_cap_mb of the arm ddp, one after the other (25,8,4,2,1)")
    what.add_argument("--ratios", type=positive_numbers, default=[0.5, 0.8, 1.0, 1.33, 2.0], metavar="A/C,...",
                      help="paced: time of communication over time of compute (0.5,0.8,1,1.33,2)")
    what.add_argument("--profile", type=names(["uniform", "heavy-end"]), default=["uniform"], metavar="NAME,...",
                      help="paced: uniform, heavy-end: parameters grow towards the end, as in a ResNet (uniform)")
    what.add_argument("--blocks", type=positive_int, default=8, help="paced (%(default)s)")
    what.add_argument("--weights-per-block", type=positive_int, default=4, help="paced (%(default)s)")
    what.add_argument("--parameters", type=positive_int, default=10_000_000, help="paced: in all (%(default)s)")
    what.add_argument("--tokens", type=positive_int, default=320, help="transformer: tokens in a batch (%(default)s)")
    what.add_argument("--fusion-mb", type=float, help="for the arms of ddp_crossover (its default)")
    how = parser.add_argument_group("how")
    how.add_argument("--hosts", type=int, choices=range(2, 9), default=2, help="(%(default)s)")
    how.add_argument("--rate", default="1gbit", help="each host sends at most so fast, as for tc; none: no limit")
    how.add_argument("--burst", default="256kb", help="see tc-tbf(8) (%(default)s)")
    how.add_argument("--latency", default="20ms", help="see tc-tbf(8) (%(default)s)")
    how.add_argument("--no-lab", action="store_true",
                     help="processes over loopback: to try the bench without root, NOT a measurement of a network")
    how.add_argument("--rounds", type=positive_int, default=12, help="turns of each arm (%(default)s)")
    how.add_argument("--steps-per-round", type=positive_int, default=5, help="timed steps of a turn (%(default)s)")
    how.add_argument("--quick", action="store_true", help="3 rounds, A/C = 1, buckets 25 and 2 MB")
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="every figure, written after each case")
    out.add_argument("--plot", type=Path, metavar="FILE", help="bar chart as PNG (needs matplotlib)")
    # fmt: on
    args = parser.parse_args(arguments)
    if args.quick:
        args.rounds, args.ratios, args.buckets = 3, [1.0], [DEFAULT_BUCKET_MB, 2.0]
    args.arms = written_out(args.arms, args.buckets)
    return args


def written_out(arms: list[str], buckets_mb: list[float]) -> list[str]:
    """Arms in their canonical names, each once, `ddp` once for each bucket size, and `noop` first."""
    names = ["noop"]
    for arm in arms:
        names += [f"ddp@{size:g}" for size in buckets_mb] if arm == "ddp" else [str(ArmName.parse(arm))]
    return list(dict.fromkeys(names))


def names(known: list[str]):  # type: ignore[no-untyped-def]
    """An argparse type: a comma-separated list of known names."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return text.split(",")

    return parse


def arm_names(text: str) -> list[str]:
    """An argparse type: a comma-separated list of arms."""
    try:
        return [arm if arm == "ddp" else str(ArmName.parse(arm)) for arm in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_numbers(text: str) -> list[float]:
    """An argparse type: comma-separated numbers above zero."""
    numbers = [float(number) for number in text.split(",")]
    if not all(number > 0 and math.isfinite(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: positive numbers")
    return numbers


def positive_int(text: str) -> int:
    """An argparse type: a whole number above zero."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
