"""What the benches have in common beside their figures: what these depend on, and the files they go to."""

import argparse
import contextlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any


def surroundings(args: argparse.Namespace) -> dict[str, Any]:
    """The machine, and everything that was asked for on the command line, as JSON takes it."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor_name(),
    } | {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def processor_name() -> str:
    """The model name that Linux knows, else what Python says."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def write(args: argparse.Namespace, record: dict[str, Any], draw: Callable[[dict[str, Any], Path], None]) -> None:
    """Write the files asked for. After each case, so that a long run that breaks off leaves what it has."""
    for path in filter(None, (args.json, args.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    if args.plot:
        draw(record, args.plot)
