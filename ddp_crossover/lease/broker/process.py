"""The process of a broker that a client has started. It outlives that client."""

from __future__ import annotations

import logging
import os
import signal
import sys
from logging.handlers import RotatingFileHandler

from ..directory import BrokerDirectory
from .server import Broker, BrokerSettings, logger


def main(path: str) -> None:
    """Listen in the directory ``path``, then serve in a forked child. The parent exits, which shows that it listens."""
    directory = BrokerDirectory(path)
    broker = Broker(directory, BrokerSettings())
    if not broker.serving or os.fork():
        os._exit(0)
    # Undo the starter's CPU affinity: it may be pinned to one core, which its training needs.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.umask(0o077)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    log_to_file(directory)
    try:
        broker.serve_forever()
    except Exception:
        logger.exception("the broker ends because of an error")  # stderr goes to /dev/null
        raise


def log_to_file(directory: BrokerDirectory) -> None:
    """Send the broker's log to its directory, in two files of at most 64 KiB."""
    logging.raiseExceptions = False  # ignore logging errors, such as a full disk
    handler = RotatingFileHandler(directory.log, maxBytes=1 << 16, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
