"""Measure ways to train with a sharded optimizer on a slow network that is built on this machine: time, and memory.

    sudo python scripts/bench_shard.py --quick                          # time: a first look, a few minutes
    sudo python scripts/bench_shard.py --json shard.json --plot shard.png
    python scripts/bench_shard.py --no-lab --quick                      # without root; no network is measured
    python scripts/bench_shard.py --memory --json memory.json           # memory, over loopback, without root
    python scripts/bench_shard.py --memory --ranks 2 --repeats 1 --arms ddp,zero

Times are measured as bench.py does it, with all arms in the same processes. For memory each arm gets fresh ranks of its
own. An arm that was asked for and cannot run is named, and the exit code is 1. docs/bench.md explains the figures.
"""

import argparse
import sys
from typing import Any

from bench import configuration, network
from bench_kit.launch import OnProgress, RunRanks
from bench_kit.run import Bench, run_cases
from bench_parts import chart
from bench_parts.measure import measure
from bench_parts.options import make_cases
from bench_parts.settings import CaseSettings
from bench_shard_parts import memory, report
from bench_shard_parts.options import parse_args
from bench_shard_parts.ratios import with_ratios


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns 2 if the lab cannot be built, 1 if a case failed or an arm was refused, else 0."""
    args = parse_args(__doc__, arguments)
    refused: list[str] = []
    exit_code = memory.run(args, refused) if args.memory else run_times(args, refused)
    for refusal in dict.fromkeys(refused):
        print(f"bench_shard: {refusal}", file=sys.stderr)
    return exit_code or bool(refused)


def run_times(args: argparse.Namespace, refused: list[str]) -> int:
    """Measure times. Appends arms that could not run, with the reason, to `refused`."""

    def measure_case(settings: CaseSettings, run_ranks: RunRanks, on_progress: OnProgress) -> dict[str, Any]:
        case = with_ratios(measure(settings, run_ranks, on_progress))
        refused.extend(f"{arm['arm']}: {arm['refused']}" for arm in case["arms"] if arm["refused"])
        return case

    way_out = ". Without a lab: --no-lab, or --memory for memory alone"
    bench = Bench("bench_shard", network(args), measure_case, report.print_times, chart.draw, way_out)
    return run_cases(bench, make_cases(args), args, configuration(args))


if __name__ == "__main__":
    sys.exit(main())
