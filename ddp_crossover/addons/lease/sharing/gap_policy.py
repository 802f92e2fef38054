"""Decides which waits to give to another job, and whether sharing pays at all. Pure: no clock, no I/O."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from typing import NamedTuple

# Shortest gap to give away, in hand-offs: a shorter one would be spent mostly on handing over.
_PAYS_HAND_OFFS = 10
_FIRST_HAND_OFF_S = 100e-6
_LONGEST_HAND_OFF_S = 1e-3
_WAITS_KEPT = 5
_TRY_EVERY = 50
_HAND_OFFS_KEPT = 9

MIN_GAIN = 0.02
_WINDOW_STEPS = 10
_MOST_LOST_S = 1.0
_FIRST_BREAK_STEPS = 250
_LONGEST_BREAK_STEPS = 4000


class ExpectedWaits:
    """Predicts how long a wait will be, from the median of its latest times, and what a hand-off costs."""

    def __init__(self) -> None:
        self._waits_s: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_WAITS_KEPT))
        self._untried: Counter[Hashable] = Counter()
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

    def is_worth_trying(self, key: Hashable) -> bool:
        """Whether to measure a wait although measuring blocks the host: it was long, or was not measured lately."""
        if not self._waits_s.get(key) or self.is_worth_giving(key, 0.0):
            return True
        self._untried[key] += 1
        return self._untried[key] % _TRY_EVERY == 0


class StepFigures(NamedTuple):
    """What the ledger of a job has added up in one step.

    Attributes:
        elapsed_s: duration of the step.
        filled_s: time inside gaps in which another job held the lease.
        slowed_s: time by which sharing has slowed this job down.
        was_disturbed: whether another job has wanted or held the device.
    """

    elapsed_s: float
    filled_s: float
    slowed_s: float
    was_disturbed: bool


class Gain:
    """Decides whether sharing the device pays, and takes breaks from sharing where it does not.

    The gain of a step is the time of its waits in which another job held the device, less the time by which this job
    was slowed down, as a fraction of the step. A turn slows the job down only by the time for which it waited beyond
    the time for which it then held the lease. The comparison is with both jobs using the device at once: each would get
    half of it, so a turn that waits no longer than it holds would have ended as late without a lease.

    Attributes:
        sharing: False during a break.
        last: the gain in the latest window of steps; None before the first.
    """

    def __init__(self) -> None:
        self.sharing = True
        self.last: float | None = None
        self._steps = 0
        self._break_steps = _FIRST_BREAK_STEPS
        self._elapsed_s = self._gained_s = 0.0

    def step(self, step: StepFigures) -> None:
        """Account for a step. Steps in which no other job wanted the device are not counted, except in a break."""
        if not self.sharing:
            self._steps += 1
            if self._steps >= self._break_steps:
                self._break_steps = min(2 * self._break_steps, _LONGEST_BREAK_STEPS)
                self._start(sharing=True)
        elif step.was_disturbed:
            self._steps += 1
            self._elapsed_s += step.elapsed_s
            self._gained_s += step.filled_s - step.slowed_s
            if self._steps >= _WINDOW_STEPS or self._gained_s < -_MOST_LOST_S:
                self._decide()

    def _decide(self) -> None:
        self.last = self._gained_s / self._elapsed_s if self._elapsed_s else 0.0
        pays = self.last >= MIN_GAIN
        if pays:
            self._break_steps = _FIRST_BREAK_STEPS
        self._start(sharing=pays)

    def _start(self, *, sharing: bool) -> None:
        self.sharing = sharing
        self._steps = 0
        self._elapsed_s = self._gained_s = 0.0
