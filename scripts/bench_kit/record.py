"""The record of a bench: what its figures depend on, and the files that they are written to."""

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

Draw = Callable[[dict[str, Any], Path], None]
"""Draws a record as a chart and writes it to a file."""


def configuration(args: argparse.Namespace, **facts: Any) -> dict[str, Any]:
    """Everything that the figures depend on: `facts`, the machine, and all arguments, in types that JSON has."""
    machine = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)),
    }
    arguments = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    return facts | machine | arguments


def show_configuration(config: dict[str, Any]) -> None:
    """Print the configuration in one line."""
    print("  ".join(f"{key}={value}" for key, value in config.items()), flush=True)


def write(record: Any, json_file: Path | None, plot_file: Path | None = None, draw: Draw | None = None) -> None:
    """Write the files that were asked for. A long run does so after each case: if it breaks off, the others remain."""
    for path in filter(None, (json_file, plot_file)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if json_file:
        _replace(json_file, json.dumps(record, indent=2) + "\n")
    if plot_file and draw:
        draw(record, plot_file)


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: a run that is killed in the middle leaves the old one."""
    if path.exists() and not path.is_file():
        path.write_text(text)  # /dev/stdout, say, which cannot be replaced
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _processor_name() -> str:
    """The model name that Linux knows, or what Python says."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
