"""Environments of their own for packages that the tests do not install, over that of the tests."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import torch
import torchvision

INSTALL_TIMEOUT_S = 300


def make(folder: Path, packages: Sequence[str], without_dependencies: Sequence[str] = ()) -> Path | str:
    """Make one that has these packages, and those without what they ask for.

    Returns its Python, or why there is none: what pip has said last.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={_release(torch)}\ntorchvision=={_release(torchvision)}\n")
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    for options, wanted in ((("-c", constraints), packages), (("--no-deps",), without_dependencies)):
        if wanted:
            job = subprocess.run(
                [*map(str, (*pip, *options)), *wanted], capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
            )
            if job.returncode:
                return job.stderr.strip().splitlines()[-1]
    return python


def _release(module: object) -> str:
    version: str = vars(module)["__version__"]
    return version.partition("+")[0]
