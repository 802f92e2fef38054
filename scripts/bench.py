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
import sys
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

import bench_record
from bench_parts import chart, report
from bench_parts.launch import CaseFailed, RunRanks, on_hosts, over_loopback, run_case
from bench_parts.options import make_cases, parse_args
from bench_parts.summary import summarize
from lab import Lab, LabError
from lab_parts.signals import ending_signals_raise

REFUSED_EXIT_CODE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run all cases; 2 if the lab cannot be built, 1 if a case failed."""
    args = parse_args(__doc__, arguments)
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
                bench_record.write(args, record, chart.draw)
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
        with ending_signals_raise():  # so that the ranks are ended, too
            yield over_loopback(args.hosts)
        return
    rate = None if args.rate == "none" else args.rate
    with Lab(args.hosts, rate=rate, burst=args.burst, latency=args.latency) as lab:
        yield on_hosts(lab)


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the figures depend on."""
    shaped = f"{args.hosts} hosts, {args.rate} each way, burst {args.burst}, latency {args.latency}"
    return {
        "network": f"loopback, {args.hosts} processes: NOT a measurement of a network" if args.no_lab else shaped,
        "is_network_measurement": not args.no_lab,
        "torch": torch.__version__,
        "backend": "gloo",
        "all_arms_share": "SGD, gradient_as_bucket_view=True, 1 thread per rank",
    } | bench_record.surroundings(args)


if __name__ == "__main__":
    sys.exit(main())
