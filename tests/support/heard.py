"""What the package says to its user."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what the package logs in this process; for ranks, in which pytest's own ``caplog`` does not run."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ddp_crossover")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
