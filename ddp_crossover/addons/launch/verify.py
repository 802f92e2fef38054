"""Check on your own script that it trains exactly as with plain DDP: same seed, compared bit for bit.

  torchrun --nproc-per-node 2 -m ddp_crossover verify --steps 40 train.py --epochs 10

Every rank runs the script three times for some optimizer steps: plain, attached, and plain again. Nothing is touched:
each run is on a throw-away copy of all files, where Linux allows it. Losses, parameters before each step, and at the
end parameters, buffers and optimizer state are compared, and the first difference is named. If the script does not even
repeat itself, that is said instead. The script is ended after the last step.

Beyond two ranks gloo's own sums depend on the way of each element; plain DDP then runs with a hook that adds in rank
order, as we do. NCCL's sums cannot be had in another order: there, values are compared within rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from ddp_crossover.addons.launch.compare import Verdict, compare
from ddp_crossover.addons.launch.errand import Errand
from ddp_crossover.addons.launch.meeting import Meeting
from ddp_crossover.addons.launch.run import add_attach_arguments, add_script_arguments, attach_options, script_of
from ddp_crossover.addons.launch.script_run import add_run_arguments, three_runs
from ddp_crossover.addons.launch.torchrun import tell_torchrun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``verify``."""
    add_attach_arguments(parser)
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="optimizer steps to compare. Default: 40")
    add_run_arguments(parser)
    add_script_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the script three times and compare; 0 if all is equal, 1 if not, 2 if it could not be compared."""
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {args.steps}")
    options = attach_options(args)
    command, meeting = script_of(args), Meeting()
    errand = Errand(options=options, recorded_for="verify", steps=args.steps)
    with three_runs(command, errand, meeting, args) as (records, why_not_attached, unsynchronized):
        plain, attached, again = records
        verdicts = {
            rank: compare(plain[rank], attached[rank], again[rank], options, why_not_attached) for rank in plain
        }
    for rank, verdict in verdicts.items():
        _print(verdict, rank, unsynchronized, as_json=args.json)
        if verdict.exit_status:
            tell_torchrun(f"verify: {verdict.text}")
    return max(verdict.exit_status for verdict in verdicts.values())


def _print(verdict: Verdict, rank: int, unsynchronized: str | None, *, as_json: bool) -> None:
    if rank == 0 and as_json:
        print(json.dumps(asdict(verdict) | {"unsynchronized": unsynchronized}))
    elif rank == 0:
        print(f"verify: {verdict.text}")
        if unsynchronized is not None:
            print(f"{unsynchronized} Plain DDP does the same.")
    elif verdict.exit_status:
        print(f"verify: rank {rank}: {verdict.text}", file=sys.stderr)
