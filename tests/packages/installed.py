"""Gets the packages of the list into a folder of their own, beside this environment's torch."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SECONDS = 300.0


def missing(requirements: Sequence[str]) -> list[str]:
    """Those that this environment lacks. What it has serves in any version."""
    return [each for each in requirements if not _is_here(each.partition("==")[0])]


def install(requirements: Sequence[str], folder: Path) -> dict[str, str]:
    """Install packages without what they depend on, which would be another torch; returns why some could not be."""
    if not requirements or not _pip(requirements, folder):
        return {}
    reasons = {each: _pip([each], folder) for each in requirements}  # one that cannot be had must not keep the others
    return {each: reason for each, reason in reasons.items() if reason}


def _pip(requirements: Sequence[str], folder: Path) -> str:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-input", "--upgrade", "--target", str(folder), *requirements],
        capture_output=True,
        text=True,
        timeout=SECONDS * max(1, len(requirements) // 20),
    )
    return (done.stderr.strip().splitlines() or ["pip failed"])[-1] if done.returncode else ""


def _is_here(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
