"""The scripts of the repository that are commands: a demo, emulated hosts, a check of a GPU.

A checkout has them in ``scripts/``, a wheel in ``ddp_crossover/_scripts/`` (``pyproject.toml`` says which). Each is a
program of its own, with its own command line, and runs as a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parents[1]


class Script(NamedTuple):
    """One of them: its file, what it is for, and the modules that it needs beyond this package, each with its extra."""

    file: str
    summary: str
    needs: dict[str, str]


SCRIPTS = {
    "demo": Script(
        "demo.py",
        "Show on this machine what is gained on a slow network: DDP, DDP at its best, and this, on real images.",
        {"torchvision": "examples", "sklearn": "examples", "matplotlib": "plot"},
    ),
    "lab": Script("lab.py", "Run a command on several hosts that are emulated on this machine (Linux, root).", {}),
    "gpu-check": Script(
        "gpu_check.py", "Check and measure on a GPU what can be known nowhere else.", {"torchvision": "examples"}
    ),
}


def start(name: str, arguments: Sequence[str]) -> int:
    """Become the process of this script; returns only where that fails.

    Raises:
        ImportError: if a module that it needs is not installed; names the extra that has it.
        OSError: if the process cannot be started.
    """
    script = SCRIPTS[name]
    missing = [module for module in script.needs if importlib.util.find_spec(module) is None]
    if missing:
        extras = ",".join(dict.fromkeys(script.needs[module] for module in missing))
        raise ImportError(f'{name} needs {", ".join(missing)}: pip install "ddp_crossover[{extras}]"')
    environment = dict(os.environ)
    folder = _PACKAGE / "_scripts"
    if not folder.is_dir():  # a checkout, which may not be installed
        folder = _PACKAGE.parent / "scripts"
        paths = [str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    os.execve(sys.executable, [sys.executable, str(folder / script.file), *arguments], environment)
