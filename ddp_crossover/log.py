"""What the package says while a program trains: its one logger, ``ddp_crossover``, and numbers and names for people."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

logger = logging.getLogger("ddp_crossover")
_SPEAKER = "ddp_crossover: "


def say(text: str, level: int = logging.INFO) -> None:
    """Log one line, without a prefix: handlers show the name of the logger.

    In a program that has not set up logging, the line goes to stderr, and says who speaks. ``logging`` itself would
    print only warnings there, without a name.
    """
    if logger.hasHandlers():
        logger.log(level, "%s", text)
    elif level >= logger.level and level > logger.manager.disable:
        print(f"{_SPEAKER}{text}", file=sys.stderr, flush=True)


def without_speaker(line: str) -> str:
    """Return what :func:`say` was given, of a line that it has printed."""
    return line.rpartition(_SPEAKER)[2]


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def short(value: float) -> str:
    """Return a number of three digits or more, without an exponent."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
