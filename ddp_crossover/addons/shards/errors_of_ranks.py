"""Raises an error of one rank on all of them, where they next exchange numbers.

An owner's update may do what no step has done that was watched. Raised at once, on this rank only, that would leave the
others waiting for its gather legs.
"""

from __future__ import annotations

import logging

from ddp_crossover.comm.link import Link
from ddp_crossover.log import say

_HAS_FAILED = -(1 << 62)  # no number that ranks exchange


class ErrorsOfRanks:
    """Errors that ranks have kept for each other.

    Args:
        link: link between the ranks.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._error: Exception | None = None

    def keep(self, error: Exception) -> None:
        """Keep an error of this rank until the next exchange; of several, as of each fusion group, the first one."""
        if self._error is None:
            self._error = error
            say(f"{error}. All ranks raise an error in their next step", logging.WARNING)

    def exchange_numbers(self, value: int) -> list[int]:
        """Send one number to all ranks; returns those of all in rank order.

        Raises:
            RuntimeError: on all ranks, if one has kept an error.
        """
        numbers = self._link.exchange_numbers(value if self._error is None else _HAS_FAILED)()
        if self._error is not None:
            raise self._error
        if _HAS_FAILED in numbers:
            rank = numbers.index(_HAS_FAILED)
            raise RuntimeError(f"the optimizer's update of its shards has failed on rank {rank}: see the error there")
        return numbers
