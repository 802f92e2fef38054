"""Decides which waits to give to another job, and whether sharing pays at all. Pure: no clock, no I/O."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable
from typing import NamedTuple

# Shortest gap to give away, in hand-offs: a shorter one would be spent mostly on handing over.
_PAYS_HAND_OFFS = 10
_FIRST_HAND_OFF_S = 100e-6
_LONGEST_HAND_OFF_S = 1e-3
_WAITS_KEPT = 5
_HAND_OFFS_KEPT = 9

MIN_GAIN = 0.02
_WINDOW_STEPS = 20
# At the beginning of a window the host runs ahead of the device, and jobs are not in step yet.
_UNSTEADY_STEPS = 10
_COMPARE_EVERY_STEPS = 1000
_MOST_LOST_S = 1.0
_FIRST_BREAK_STEPS = 250
_LONGEST_BREAK_STEPS = 4000


class ExpectedWaits:
    """Predicts how long a wait will be, from the median of its latest times, and what a hand-off costs."""

    def __init__(self) -> None:
        self._waits_s: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_WAITS_KEPT))
        self._acquires_s: deque[float] = deque(maxlen=_HAND_OFFS_KEPT)
        self._releases_s: deque[float] = deque(maxlen=_HAND_OFFS_KEPT)

    def note(self, key: Hashable, waited_s: float) -> None:
        """Note the length of a wait that is over; 0 if the result was there already."""
        self._waits_s[key].append(waited_s)

    def note_acquire(self, seconds: float) -> None:
        """Note the time of an acquire that had to wait for no other job."""
        self._acquires_s.append(seconds)

    def note_release(self, seconds: float) -> None:
        self._releases_s.append(seconds)

    @property
    def hand_off_s(self) -> float:
        """Seconds that it costs to release and reacquire the lease, without the time that another job holds it."""
        if not self._acquires_s or not self._releases_s:
            return _FIRST_HAND_OFF_S
        # The minimum, because another job may have taken the lease just before an acquire that seemed free.
        return min(min(self._acquires_s) + min(self._releases_s), _LONGEST_HAND_OFF_S)

    def is_worth_giving(self, key: Hashable, waited_s: float) -> bool:
        """Whether to give away the rest of a wait that has lasted for ``waited_s`` seconds.

        A wait much longer than expected is given away as well. It may be part of a deadlock, in which another rank
        waits for a job that waits for this one's lease.
        """
        known_s = self._waits_s.get(key)
        expected_s = statistics.median(known_s) if known_s else 0.0
        return abs(expected_s - waited_s) >= _PAYS_HAND_OFFS * self.hand_off_s


class StepFigures(NamedTuple):
    """What the ledger of a job has added up in one step.

    Attributes:
        elapsed_s: duration of the step, with all that the script has done since the one before.
        waited_s: the part of it in which compute waited for the lease.
        was_disturbed: whether another job has wanted or held the device.
    """

    elapsed_s: float
    waited_s: float
    was_disturbed: bool


class Gain:
    """Decides whether sharing pays, and takes breaks from it where it does not: is this job faster with its lease?

    Steps in which another job wanted or held the device are compared, some with the lease and some without it. That is
    all that a job can know of what matters to its user: with MPS, or beside kernels that wait, two jobs may do better
    at once than in turns, whatever gaps they fill.

    Attributes:
        sharing: False in a break, and in the steps without the lease that others are compared with.
        last: by how much steps were shorter with the lease, as a part of those without, when last compared; None before
            that.
    """

    def __init__(self) -> None:
        self.sharing = True
        self.last: float | None = None
        self._shared_s = math.inf  # the median of the latest steps with the lease
        self._plain_s: float | None = None  # the same without it, when last compared
        self._window: list[StepFigures] = []
        self._compared_before_steps = 0
        self._left_steps = 0  # of a break
        self._break_steps = _FIRST_BREAK_STEPS

    @property
    def takes_break(self) -> bool:
        """Whether sharing has not paid."""
        return self._left_steps > 0

    def step(self, step: StepFigures) -> None:
        """Account for a step. With the lease those in which no other job wanted the device are not counted."""
        if self.takes_break:
            self._left_steps -= 1
            if self._left_steps == 0:
                self.sharing, self._plain_s = True, None
        elif step.was_disturbed or not self.sharing:
            self._compared_before_steps += 1
            window = self._window
            window.append(step)
            waits_s = [one.waited_s for one in window]
            # Against the usual wait: a script may pause between steps, but not within a wait for the lease.
            lost_s = sum(waits_s) - len(waits_s) * statistics.median_low(waits_s)
            if len(window) >= _WINDOW_STEPS or lost_s > _MOST_LOST_S:
                self._window = []
                steady = window[_UNSTEADY_STEPS:] or window
                self._window_ended(statistics.median(one.elapsed_s for one in steady))

    def _window_ended(self, step_s: float) -> None:
        if not self.sharing:
            self._compare(step_s)
            return
        self._shared_s = step_s
        is_known = self._plain_s is not None and self._compared_before_steps < _COMPARE_EVERY_STEPS
        if not (is_known and step_s <= (self._plain_s or 0.0)):
            self.sharing = False

    def _compare(self, plain_s: float) -> None:
        self._plain_s, self._compared_before_steps = plain_s, 0
        self.last = 1 - self._shared_s / plain_s
        self.sharing = self._pays(plain_s)
        if self.sharing:
            self._break_steps = _FIRST_BREAK_STEPS
        else:
            self._left_steps = self._break_steps
            self._break_steps = min(2 * self._break_steps, _LONGEST_BREAK_STEPS)

    def _pays(self, plain_s: float) -> bool:
        return self._shared_s <= (1 - MIN_GAIN) * plain_s
