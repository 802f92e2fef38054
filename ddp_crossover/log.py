"""What the package says while a program trains: one logger for all of it, named ``ddp_crossover``."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("ddp_crossover")


def say(text: str, level: int = logging.INFO) -> None:
    """Log one line, without a prefix: handlers show the name of the logger.

    In a program that has not set up logging, the line goes to stderr, and says who speaks. ``logging`` itself would
    print only warnings there, without a name.
    """
    if logger.hasHandlers():
        logger.log(level, "%s", text)
    elif level >= logger.level and level > logger.manager.disable:
        print(f"ddp_crossover: {text}", file=sys.stderr, flush=True)
