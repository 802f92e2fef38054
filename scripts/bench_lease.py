"""Jobs that share hosts: one after the other, all at once, and all at once with a lease. The device is emulated.

    sudo python scripts/bench_lease.py --cases equal --quick          # a first look, under two minutes
    sudo python scripts/bench_lease.py --json lease.json --plot lease.png

Each case runs some jobs on all hosts of a lab (network namespaces with shaped links, one core each), which
share the host's core, its link and a device that only one job's kernel uses at a time. docs/lease-bench.md says what
the figures mean. Needs root.
"""

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench import processor_name
from bench_lab.launch import CaseFailed, on_hosts
from bench_lab.report import Display
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
                write(args, record)
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
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "backend": "gloo",
        "all_jobs_share": "SGD, gradient_as_bucket_view=True, 1 thread per rank, 1 core per host",
    } | {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def write(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write the files asked for. After each case, so that a long run that breaks off leaves what it has."""
    for path in filter(None, (args.json, args.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    if args.plot:
        chart.draw(record, args.plot)


if __name__ == "__main__":
    sys.exit(main())
