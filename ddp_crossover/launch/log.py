"""Shows this package's log in scripts that have not set up logging."""

from __future__ import annotations

import logging


def show_log() -> None:
    """Print messages from INFO on to stderr, unless the script or somebody else handles them."""
    logger = logging.getLogger("ddp_crossover")
    if not logger.handlers and logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
        logger.addHandler(_UnlessHandledAbove())


class _UnlessHandledAbove(logging.StreamHandler):  # type: ignore[type-arg]
    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless the script has set up logging by now."""
        if not logging.getLogger().handlers:
            super().emit(record)
