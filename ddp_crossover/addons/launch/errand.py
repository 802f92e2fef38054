"""What a process that runs a user's script is asked to do beside.

An environment variable tells it, and its children. Loads no torch: it is read when an interpreter starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

VARIABLE = "DDP_CROSSOVER_ERRAND"
STEPS_MADE = "steps_made"  # file in an errand's folder
# The folder whose ``sitecustomize`` Python imports at the start of every interpreter that has it on its path.
_SITE = Path(__file__).parent / "site"
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Errand:
    """What is done in a script that does not know of it.

    Attributes:
        options: keyword arguments of ``attach``, as JSON values; None to attach to nothing.
        stats_file: where rank 0 writes the figures of each model when the process ends.
        recorded_for: the command that records the script, ``"verify"`` or ``"doctor"``; None under ``run``.
        folder: where each rank writes the record for that command, and rank 0 in ``STEPS_MADE`` how far it is.
        steps: number of optimizer steps after which that command ends the script.
    """

    options: dict[str, Any] | None = field(default_factory=dict)
    stats_file: str | None = None
    recorded_for: str | None = None
    folder: str = ""
    steps: int = 0

    @property
    def is_seeded(self) -> bool:
        """Whether random numbers are seeded, so that runs can be compared."""
        return self.recorded_for == "verify"


def errand_of_process() -> Errand | None:
    """Return what this process was asked to do, or None."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Errand(**json.loads(text))


def seed(errand: Errand) -> None:
    """Seed what differs from run to run; for torch itself see ``watch.run_errand``."""
    if errand.is_seeded:
        random.seed(SEED)
        with contextlib.suppress(ImportError):
            import_module("numpy").random.seed(SEED)


def environment_with(errand: Errand) -> dict[str, str]:
    """Return the environment in which Python runs scripts with this errand; the scripts' children inherit it."""
    seeds = {"PYTHONHASHSEED": str(SEED)} if errand.is_seeded else {}
    before = os.environ.get("PYTHONPATH")
    path = [str(_SITE), *(before.split(os.pathsep) if before else ())]  # an empty entry is the working directory
    return {
        **os.environ,
        **seeds,
        VARIABLE: json.dumps(asdict(errand)),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
    }


def python_command(script: Sequence[str], *, is_module: bool) -> list[str]:
    """Return the command that runs a script and its arguments with this interpreter and the options it was given."""
    options = sys.orig_argv[1 : sys.orig_argv.index("-m")] if "-m" in sys.orig_argv else []
    return [sys.executable, *options, *(["-m"] if is_module else []), *script]
