"""Predicts when a forward can begin and then run through: all of its waits become one, before it. Pure: no clock.

A forward that begins at ``max(arrival - compute before the wait)`` over its waits does not stall, and ends exactly when
it would have ended with stalls. One that begins earlier stalls for the difference, in one piece or in many.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

_STEPS_KEPT = 9
# A job that fills gaps gives way in a few ms; to ask even earlier would cut a turn of another training job short.
_LONGEST_LEAD_S = 5e-3
# Rather a short stall, in which the device is idle, than a forward that ends late.
MARGIN_S = 0.5e-3


class Use(NamedTuple):
    """One wait of a forward for a gather leg.

    Attributes:
        arrival_s: when the leg has arrived, from the end of backward on; negative if that was before.
        compute_s: for how long forward computes before it gets to the wait.
    """

    arrival_s: float
    compute_s: float


def start_s(uses: Iterable[Use]) -> float:
    """The earliest begin of a forward that does not stall, in seconds from the end of backward on; never negative."""
    return max(0.0, *(use.arrival_s - use.compute_s for use in uses), 0.0)


class ForwardStarts:
    """Learns from each step when its forward could have begun; the next one is predicted from the latest steps."""

    def __init__(self) -> None:
        self._starts_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._grants_s: deque[float] = deque(maxlen=_STEPS_KEPT)

    def note(self, could_begin_s: float) -> None:
        """Note when a forward could have begun, see :func:`start_s`."""
        self._starts_s.append(could_begin_s)

    def note_grant(self, waited_s: float) -> None:
        """Note how long another job needed to give the device back."""
        self._grants_s.append(waited_s)

    @property
    def lead_s(self) -> float:
        """How long before its forward a job should ask for the device, so that it has it in time."""
        lead_s = statistics.median(self._grants_s) if self._grants_s else 0.0
        return lead_s if lead_s <= _LONGEST_LEAD_S else 0.0

    @property
    def predicted_s(self) -> float | None:
        """When the next forward should begin, in seconds from the end of backward on; None if nothing is known."""
        if not self._starts_s:
            return None
        return max(0.0, statistics.median(self._starts_s) - MARGIN_S)
