"""Measure jobs that share hosts: one after the other, all at once, and all at once with a lease.

    sudo python scripts/bench_lease.py --cases equal --quick          # a first look, under two minutes
    sudo python scripts/bench_lease.py --json lease.json

Each case runs some jobs on all hosts of a lab (network namespaces with shaped links, one core each). The jobs of a host
share its core, its link and a device that runs one job's kernel at a time. The device is emulated. Needs root.
docs/lease-bench.md explains the figures; scripts/bench_handoff.py times hand-offs.
"""

import sys

import torch

from bench_kit import record
from bench_kit.launch import on_lab
from bench_kit.run import Bench, run_cases
from bench_lease_parts.cases import make_case, parse_args
from bench_lease_parts.conductor import run_case
from bench_lease_parts.figures import print_case, summarize


def main(arguments: list[str] | None = None) -> int:
    """Run all cases; returns 2 if the lab cannot be built, 1 if a case failed, else 0."""
    args = parse_args(__doc__, arguments)
    bench = Bench(
        "bench_lease",
        on_lab(args.hosts, args.rate),
        lambda settings, run_ranks, progress: summarize(settings, run_case(settings, args.hosts, run_ranks, progress)),
        print_case,
    )
    configuration = record.configuration(
        args,
        device="EMULATED: sleeps in time slices, one job's at a time",
        network=f"{args.hosts} hosts, {args.rate} each way",
        torch=torch.__version__,
        backend="gloo",
        all_jobs_share="SGD, gradient_as_bucket_view=True, schedule='dear', 1 thread per rank, 1 core per host",
    )
    return run_cases(bench, [make_case(name, args) for name in args.cases], args, configuration)


if __name__ == "__main__":
    sys.exit(main())
