"""Starts a broker that outlives the job that starts it. What the new process does is in :mod:`..broker.process`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..directory import BrokerDirectory

# Run without site-packages and with the standard library first on the path. `lease` is then a top-level package, whose
# import does not load torch. See the docstring of the package.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from lease.broker.process import main; main(sys.argv[2])"
_START_S = 10.0


def spawn_broker(directory: BrokerDirectory) -> None:
    """Start a broker unless one is running, and return once it listens, after about 0.1 s.

    Raises ``OSError``, ``subprocess.SubprocessError``.
    """
    parent_of_lease = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, str(parent_of_lease), str(directory.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    try:
        process.wait(_START_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
