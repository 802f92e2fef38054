"""Scripts that a test starts as a user would: in processes of their own, of which none is left when one hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
END_S = 45.0  # torchrun gives its ranks 30 s to end


def torchrun(ranks: int = 2) -> tuple[str, ...]:
    """The arguments of Python that come before a script and start it on so many ranks."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def start(
    *arguments: object,
    python: str | Path = sys.executable,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[str]:
    """Start Python, for which the package is that of this checkout. What it prints to stderr goes to its stdout.

    `options` are of `subprocess.Popen`.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(variables or {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [str(python), *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | environment, text=True, **(streams | options))


def finish(job: subprocess.Popen[str], timeout_s: float) -> str:
    """Wait for a job; returns what it printed. One that hangs is told to end, and so ends its ranks, or else killed."""
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        job.terminate()
        try:
            output, _ = job.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            job.kill()
            output, _ = job.communicate()
        pytest.fail(f"no end within {timeout_s} s:\n{output}")
    return output


def run(*arguments: object, timeout_s: float, **options: Any) -> str:
    """Start Python and wait for an end that must be a good one; returns what it printed."""
    job = start(*arguments, **options)
    output = finish(job, timeout_s)
    assert job.returncode == 0, output
    return output
