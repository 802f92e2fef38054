"""Which waits are worth giving to another job, and whether sharing pays at all. Pure: times in, decisions out."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Hashable

# A gap that is not worth so many hand-offs would be spent on handing over.
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
    """How long each wait will be: the median of what it was in the latest steps; and what a hand-off costs here."""

    def __init__(self) -> None:
        self._waits_s: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_WAITS_KEPT))
        self._untried: Counter[Hashable] = Counter()
        self._acquires_s: deque[float] = deque(maxlen=_HAND_OFFS_KEPT)
        self._releases_s: deque[float] = deque(maxlen=_HAND_OFFS_KEPT)

    def note(self, key: Hashable, waited_s: float) -> None:
        """A wait is over; 0 where there was nothing to wait for."""
        self._waits_s[key].append(waited_s)

    def note_acquire(self, seconds: float) -> None:
        """An acquire that no other job stood in the way of."""
        self._acquires_s.append(seconds)

    def note_release(self, seconds: float) -> None:
        """A release."""
        self._releases_s.append(seconds)

    @property
    def hand_off_s(self) -> float:
        """What it costs to give the lease away and get it back, without the time that another job holds it."""
        if not self._acquires_s or not self._releases_s:
            return _FIRST_HAND_OFF_S
        # The least, because another job may have been a moment faster than what seemed a free acquire.
        return min(min(self._acquires_s) + min(self._releases_s), _LONGEST_HAND_OFF_S)

    def is_worth_giving(self, key: Hashable, waited_s: float) -> bool:
        """Whether to give away what is left of a wait that has lasted for ``waited_s`` already.

        A wait that goes on beyond all expectation is given as well: its end may depend on another rank, which waits
        for a job that waits for this one.
        """
        known_s = self._waits_s.get(key)
        expected_s = statistics.median(known_s) if known_s else 0.0
        return abs(expected_s - waited_s) >= _PAYS_HAND_OFFS * self.hand_off_s

    def is_worth_trying(self, key: Hashable) -> bool:
        """Whether to find out how long a wait is, where that costs something: it was long, or not tried lately."""
        if not self._waits_s.get(key) or self.is_worth_giving(key, 0.0):
            return True
        self._untried[key] += 1
        return self._untried[key] % _TRY_EVERY == 0


class Gain:
    """Whether sharing the device pays; where it does not, takes a break from it.

    What is gained in a step is the time of its waits in which another job held the device, less the time by which this
    job was slowed down, as a part of the step. A job is slowed down by a turn that it had to wait for longer than
    it then held it: on a device that both use at once, it would have had half of the time all along, and have ended
    as late only if it had had at least as much to do.

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

    def step(self, elapsed_s: float, filled_s: float, slowed_s: float, *, contended: bool) -> None:
        """A step has ended. Only those in which another job was there say something.

        Args:
            elapsed_s: its duration.
            filled_s: time of its waits in which another job held the device.
            slowed_s: time by which this job was slowed down.
            contended: whether another job wanted the device at any time.
        """
        if not self.sharing:
            self._steps += 1
            if self._steps >= self._break_steps:
                self._break_steps = min(2 * self._break_steps, _LONGEST_BREAK_STEPS)
                self._start(sharing=True)
        elif contended:
            self._steps += 1
            self._elapsed_s += elapsed_s
            self._gained_s += filled_s - slowed_s
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
