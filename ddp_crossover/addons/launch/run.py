"""Run a training script that does not know of this package, attached to every DDP model that it trains.

  torchrun --nproc-per-node 4 -m ddp_crossover run train.py --epochs 10
  torchrun --nproc-per-node 4 -m ddp_crossover run --norms sharded -m my.package.train --epochs 10

The script runs as it would without; before the first training forward of each DDP model, dear_hook is attached, with
all optimizers over the parameters of the model. Rank 0 says to what. What cannot be attached to trains as plain DDP,
and rank 0 says why. DDP_CROSSOVER=off in the environment runs the script alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_crossover.addons.launch.errand import Errand, environment_with, python_command
from ddp_crossover.fusion import Schedule
from ddp_crossover.options import WIRE_DTYPES, Norms, Options, switched_off
from ddp_crossover.top_k import TopK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``run``."""
    add_attach_arguments(parser)
    parser.add_argument("--stats", metavar="FILE", help="write the figures of rank 0 to this file when the script ends")
    add_script_arguments(parser)


def add_attach_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``attach``."""
    parser.add_argument("--schedule", choices=[str(one) for one in Schedule], help="when gradients are sent")
    parser.add_argument("--fusion-mb", type=float, metavar="MIB", help="size of a fusion group. Default: searched for")
    parser.add_argument(
        "--wire-dtype",
        choices=[name.removeprefix("torch.") for name in WIRE_DTYPES],
        help="send gradients in this dtype; no longer exact",
    )
    parser.add_argument("--top-k", type=float, metavar="DENSITY", help="send this part of the gradients; not exact")
    parser.add_argument("--groups", choices=["node"], help="exchange gradients inside of nodes first, then across")
    parser.add_argument("--connections", type=int, metavar="N", help="connections to each peer, on gloo (default: 1)")
    add_norms_argument(parser)
    parser.add_argument("--no-tune", dest="tune", action="store_const", const=False, help="try no plans on real steps")
    parser.add_argument("--tuned-file", metavar="FILE", help="keep what the tuner finds there, for the next run")
    parser.add_argument("--strict", action="store_const", const=True, help="debugging aid: NaN in pending parameters")


def add_norms_argument(parser: argparse.ArgumentParser) -> None:
    """Declare how norms are taken."""
    parser.add_argument("--norms", choices=[str(one) for one in Norms], help="sharded: clipping keeps the overlap")


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the script: its path, or ``-m`` and a module's name, and everything behind it."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script, and its arguments")


def attach_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``attach`` that were given, as JSON values.

    Raises:
        ValueError: for options that contradict each other.
    """
    names = ("schedule", "fusion_mb", "wire_dtype", "groups", "connections", "norms", "tune", "tuned_file", "strict")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.top_k is not None:
        options["compress"] = asdict(TopK(args.top_k))
    if "tuned_file" in options:
        options["tuned_file"] = str(Path(options["tuned_file"]).absolute())  # scripts change their folder
    Options(**{name: value for name, value in options.items() if name not in ("wire_dtype", "compress")})
    return options


def script_of(args: argparse.Namespace) -> list[str]:
    """Return the command that runs the script.

    Raises:
        ValueError: if there is no script.
    """
    if not args.script:
        raise ValueError("no script was given: name it behind the options, as in 'run train.py --epochs 10'")
    if not args.is_module and not Path(args.script[0]).exists():
        raise ValueError(f"there is no script {args.script[0]}: for a module write -m {args.script[0]}")
    return python_command(args.script, is_module=args.is_module)


def run(args: argparse.Namespace) -> int:
    """Become the script; returns only if it cannot be run."""
    switched_off()  # refuses a wrong value before anything is started
    if args.stats and not Path(args.stats).absolute().parent.is_dir():
        raise ValueError(f"--stats {args.stats}: there is no such folder; make it first")
    errand = Errand(options=attach_options(args), stats_file=args.stats and str(Path(args.stats).absolute()))
    command = script_of(args)
    sys.stdout.flush()
    sys.stderr.flush()
    # The same process: signals, its parent and its exit status are the script's.
    os.execve(shutil.which(command[0]) or command[0], command, environment_with(errand))
