"""The command line: ``python -m ddp_crossover COMMAND``, or ``ddp-crossover COMMAND`` where torchrun is not needed.

A command is a module with ``add_arguments(parser)`` and ``run(args) -> int``, the exit status; the first line of its
docstring is its help. Commands raise ValueError, OSError or ImportError for errors that the user can fix. Scripts of
the repository are commands, too, which read their own command lines.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import ddp_crossover
from ddp_crossover.addons import scripts
from ddp_crossover.addons.launch.torchrun import tell_torchrun

# Imported only when named on the command line, so that a command may need packages that the others do not.
COMMANDS = {
    "run": "ddp_crossover.addons.launch.run",
    "verify": "ddp_crossover.addons.launch.verify",
    "doctor": "ddp_crossover.addons.launch.doctor",
    "simulate": "ddp_crossover.addons.launch.simulate",
    "timeline": "ddp_crossover.report.timeline",
    "lease": "ddp_crossover.addons.lease.command",
    "cache": "ddp_crossover.addons.data.command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; ``argv`` defaults to the arguments of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    known = [*COMMANDS, *scripts.SCRIPTS]
    parser = argparse.ArgumentParser(prog=_called_as(), description="Tools around DDP communication.")
    parser.add_argument("--version", action="version", version=f"ddp_crossover {ddp_crossover.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(known) + "}")
    asked_for = [name for name in COMMANDS if name in arguments[:1]]
    if not asked_for and "--version" not in arguments:
        asked_for = list(COMMANDS)  # for the help
    for name in asked_for:
        command = importlib.import_module(COMMANDS[name])
        summary = (command.__doc__ or "").partition("\n")[0]
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    for name, script in scripts.SCRIPTS.items():
        subparsers.add_parser(name, help=script.summary)
    try:
        if arguments[:1] and arguments[0] in scripts.SCRIPTS:
            return scripts.start(arguments[0], arguments[1:])
        args = parser.parse_args(arguments)
        return int(args.run(args))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        tell_torchrun(f"error: {error}")
        return 2


def _called_as() -> str:
    name = Path(sys.argv[0]).name
    return name if name.startswith("ddp-crossover") else "python -m ddp_crossover"
