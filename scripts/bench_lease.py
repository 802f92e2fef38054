"""Jobs that share hosts: one after the other, all at once, and all at once with a lease. The device is emulated.

    sudo python scripts/bench_lease.py --cases equal --quick          # a first look, under two minutes
    sudo python scripts/bench_lease.py --json lease.json --plot lease.png

Each case runs some jobs on all hosts of a lab (network namespaces with shaped links, one core each), which
share the host's core, its link and a device that only one job's kernel uses at a time. docs/lease-bench.md says what
the figures mean. Needs root.
"""

import argparse
import sys
from typing import Any

import torch
from rich.console import Console

import bench_record
from bench_parts.launch import CaseFailed, on_hosts
from bench_parts.report import Display
from bench_lease_parts import chart, report
from bench_lease_parts.cases import make_case
from bench_lease_parts.conductor import run_case
from bench_lease_parts.figures import summarize
from bench_lease_parts.options import parse_args
from lab import Lab, LabError

REFUSED_EXIT_CODE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run all cases; 2 if the lab cannot be built, 1 if a case failed."""
    args = parse_args(__doc__, arguments)
    console = Console()
    record: dict[str, Any] = {"configuration": configuration(args), "cases": []}
    console.print("  ".join(f"{key}={value}" for key, value in record["configuration"].items()), highlight=False)
    try:
        with (
            Lab(args.hosts, rate=None if args.rate == "none" else args.rate) as lab,
            Display(console, len(args.cases)) as display,
        ):
            for name in args.cases:
                display.begin(name)
                settings = make_case(name, args)
                case = summarize(settings, run_case(settings, args.hosts, on_hosts(lab), display.update))
                report.print_case(console, case, record["configuration"]["network"])
                record["cases"].append(case)
                bench_record.write(args, record, chart.draw)
    except LabError as error:
        print(f"bench_lease: {error}", file=sys.stderr)
        return REFUSED_EXIT_CODE
    except CaseFailed as error:
        print(f"bench_lease: {error}", file=sys.stderr)
        return 1
    return 0


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the figures depend on."""
    return {
        "device": "EMULATED: sleeps in time slices, one job's at a time",
        "network": f"{args.hosts} hosts, {args.rate} each way",
        "torch": torch.__version__,
        "backend": "gloo",
        "all_jobs_share": "SGD, gradient_as_bucket_view=True, 1 thread per rank, 1 core per host",
    } | bench_record.surroundings(args)


if __name__ == "__main__":
    sys.exit(main())
