"""Starts a broker that outlives the process that starts it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from .broker import Broker, BrokerSettings, logger
from .places import Place

# Run without site-packages and with the standard library first on the path. `lease` is then a top-level package, whose
# import does not load torch. See __init__.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from lease.spawn import main; main(sys.argv[2])"
_START_S = 10.0


def spawn_broker(place: Place) -> None:
    """Start a broker unless one is running, and return once it listens, after about 0.1 s.

    Raises ``OSError``, ``subprocess.SubprocessError``.
    """
    package = Path(__file__).resolve().parent.parent
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, str(package), str(place.directory)],
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


def main(directory: str) -> None:
    """Entry point of the spawned process: listen, then serve in a forked child while the parent exits."""
    place = Place(directory)
    broker = Broker(place, BrokerSettings())
    if not broker.serving or os.fork():
        os._exit(0)
    # Undo the starter's CPU affinity: it may be pinned to one core, which its training needs.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.umask(0o077)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    log_to_file(place)
    try:
        broker.serve_forever()
    except Exception:
        logger.exception("the broker fails")  # stderr goes to /dev/null
        raise


def log_to_file(place: Place) -> None:
    """Send the broker's log to its directory, in two files of at most 64 KiB."""
    logging.raiseExceptions = False  # ignore logging errors, such as a full disk
    handler = RotatingFileHandler(place.log, maxBytes=1 << 16, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
