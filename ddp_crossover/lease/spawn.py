"""Start a broker that outlives the process that asked for it."""

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

# Without site-packages, and with the standard library first: `lease` is then a package of its own. See __init__.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from lease.spawn import main; main(sys.argv[2])"
_START_S = 10.0


def spawn_broker(place: Place) -> None:
    """Start one, unless there is one, and return when it listens. Takes about 0.1 s. Raises ``OSError``,
    ``subprocess.SubprocessError``.
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
    """The spawned process: listens, then goes on in a child that nobody waits for."""
    place = Place(directory)
    broker = Broker(place, BrokerSettings())
    if not broker.serving or os.fork():
        os._exit(0)
    # The one who asked may be pinned to a core, which is then the one that its training needs.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.umask(0o077)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    log_to_file(place)
    try:
        broker.serve_forever()
    except Exception:
        logger.exception("the broker fails")  # nobody sees its stderr
        raise


def log_to_file(place: Place) -> None:
    """Send the broker's log to its directory, in two files of at most 64 KiB."""
    logging.raiseExceptions = False  # a full disk is no reason to end
    handler = RotatingFileHandler(place.log, maxBytes=1 << 16, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
