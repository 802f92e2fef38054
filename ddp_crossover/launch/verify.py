"""Check on your own script that it trains exactly as with plain DDP: same seed, compared bit for bit.

  torchrun --nproc-per-node 2 -m ddp_crossover verify --steps 40 train.py --epochs 10

Every rank runs the script three times for some optimizer steps: plain, attached, and plain again. Losses, parameters
before each step, and at the end parameters, buffers and optimizer state are compared, and the first difference is
named. If the script does not even repeat itself, that is said instead. The script is ended after the last step.

Beyond two ranks gloo's own sums depend on the way of each element; plain DDP then runs with a hook that adds in rank
order, as we do. NCCL's sums cannot be had in another order: there, values are compared within rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from ddp_crossover.launch.compare import Verdict, compare
from ddp_crossover.launch.errand import Errand, environment_with
from ddp_crossover.launch.meeting import Meeting
from ddp_crossover.launch.run import add_attach_arguments, add_script_arguments, attach_options, script_of
from ddp_crossover.launch.script_run import progress, run_script
from ddp_crossover.launch.steps_made import STEPS_MADE, StepsMade

ARMS = ("plain", "attached", "plain again")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``verify``."""
    add_attach_arguments(parser)
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="optimizer steps to compare. Default: 40")
    parser.add_argument("--json", action="store_true", help="print the verdict of rank 0 as JSON")
    add_script_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the script three times and compare; 0 if all is equal, 1 if not, 2 if it could not be compared."""
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {args.steps}")
    options = attach_options(args)
    command = script_of(args)
    rank = int(os.environ.get("RANK", "0"))
    meeting = Meeting()
    with tempfile.TemporaryDirectory(prefix="ddp_crossover-verify-") as folder:
        for number, arm in enumerate(ARMS, 1):
            record = Path(folder, arm)
            record.mkdir()
            errand = Errand(options=options if arm == "attached" else None, record=str(record), steps=args.steps)
            what = f"verify: run {number} of {len(ARMS)}, {arm}"
            made = StepsMade(record / STEPS_MADE)
            with progress(what, made.read, args.steps) if rank == 0 else nullcontext():
                _run_arm(command, environment_with(errand) | meeting.environment(), record, arm)
        plain, attached, again = (Path(folder, arm) for arm in ARMS)
        ranks = sorted(int(record.stem) for record in plain.glob("*.json"))  # several if the script starts them itself
        verdicts = {rank: compare(plain, attached, again, rank) for rank in ranks}
    for rank, verdict in verdicts.items():
        _print(verdict, rank, as_json=args.json)
    return max(verdict.exit_status for verdict in verdicts.values())


def _run_arm(command: list[str], environment: dict[str, str], record: Path, arm: str) -> None:
    run_script(
        command,
        environment,
        has_result=lambda: any(record.glob("*.json")),
        why_not="has trained no DDP model",
        note=f" ({arm})",
    )


def _print(verdict: Verdict, rank: int, *, as_json: bool) -> None:
    if rank == 0 and as_json:
        print(json.dumps(verdict.as_dict()))
    elif rank == 0:
        print(f"verify: {verdict.text}")
    elif verdict.exit_status:
        print(f"verify: rank {rank}: {verdict.text}", file=sys.stderr)
