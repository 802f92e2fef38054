"""Measure DeAR against plain DDP and its peers on a slow network, which is built on this machine.

    sudo python scripts/bench.py --quick                        # a first look, a few minutes
    sudo python scripts/bench.py --json bench.json --plot bench.png
    sudo python scripts/bench.py --workloads transformer,resnet50 --arms noop,ddp,auto --rounds 20
    python scripts/bench.py --no-lab --quick                    # without root; no network, so no measurement of one

Each case (a workload, and for paced layers a ratio A/C) runs on all hosts of the lab, with all arms in the same
processes: in each round every arm takes a turn of a few steps. docs/bench.md explains the figures.
"""

import argparse
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from bench_kit import record
from bench_kit.launch import OnProgress, RunRanks, on_lab, over_loopback
from bench_kit.on_ranks import measure_on_ranks
from bench_kit.run import Bench, run_cases
from bench_parts import chart, rank, report
from bench_parts.cases import CaseSettings
from bench_parts.options import make_cases, parse_args
from bench_parts.summary import summarize


def main(arguments: list[str] | None = None) -> int:
    """Run all cases; returns 2 if the lab cannot be built, 1 if a case failed, else 0."""
    args = parse_args(__doc__, arguments)
    bench = Bench("bench", network(args), measure, report.print_case, chart.draw, way_out=". Without a lab: --no-lab")
    return run_cases(bench, make_cases(args), args, configuration(args))


def measure(settings: CaseSettings, run_ranks: RunRanks, on_progress: OnProgress) -> dict[str, Any]:
    """Measure one case; returns its part of the record."""
    return summarize(settings, measure_on_ranks(rank.measure, settings, run_ranks, on_progress))


def network(args: argparse.Namespace) -> AbstractContextManager[RunRanks]:
    """The hosts that the ranks run on."""
    if args.no_lab:
        return over_loopback(args.hosts * args.ranks_per_host)
    return on_lab(
        args.hosts,
        args.rate,
        args.burst,
        args.latency,
        ranks_per_host=args.ranks_per_host,
        slow_nic=args.slow_nic,
        delay_ms=args.delay_ms,
        per_connection=args.per_connection,
    )


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the figures depend on."""
    hosts = f"{args.hosts} hosts of {args.ranks_per_host} ranks"
    slow = f", the last {args.slow_nic}" if args.slow_nic else ""
    delay = f", {args.delay_ms:g} ms one way" if args.delay_ms else ""
    each = f", {args.per_connection} each connection" if args.per_connection else ""
    shaped = f"{hosts}, {args.rate} each way{slow}{delay}{each}, burst {args.burst}, latency {args.latency}"
    return record.configuration(
        args,
        network=f"loopback, {args.hosts * args.ranks_per_host} processes: NOT a measurement of a network"
        if args.no_lab
        else shaped,
        is_network_measurement=not args.no_lab,
        torch=torch.__version__,
        backend="gloo",
        all_arms_share=f"{args.optimizer}, gradient_as_bucket_view=True, 1 thread per rank",
    )


if __name__ == "__main__":
    sys.exit(main())
