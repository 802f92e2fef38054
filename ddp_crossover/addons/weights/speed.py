"""How fast a rank computes, from the times of its batches, and whether other shares of a batch would pay. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ddp_crossover.addons.weights.split import Speed, longest_s, split

# The first batches of a new size are slower: memory is allocated, kernels are chosen.
_WARMUP = 2
_LEAST_TIMES = 8
_MOST_TIMES = 64
# A rank has become faster or slower if its latest batches differ by so much from those before.
_NEW_SPEED = 0.15
# A line through two sizes that are nearly the same says nothing about its slope.
_LEAST_DISTANCE = 0.05
# A slope is at least this part of the time per sample: a line that is nearly flat would move everything to one rank.
_LEAST_SLOPE = 0.1
# Other shares must gain so much, and so many standard errors of the times.
DEAD_BAND = 0.05
_CERTAINTY = 4.0


class Measured(NamedTuple):
    """What a rank knows about its speed.

    Attributes:
        speed: its line.
        error: standard error of the times, relative.
    """

    speed: Speed
    error: float


class BatchTimes:
    """Times of one rank's batches. Keeps those of the latest size, and a point of the line from the size before."""

    def __init__(self) -> None:
        self._samples = 0
        self._times_s: deque[float] = deque(maxlen=_MOST_TIMES)
        self._to_skip = 0
        self._slope: float | None = None
        self._old: tuple[int, float] | None = None  # samples and seconds, of the size before

    def use_size(self, samples: int) -> None:
        """Begin to measure batches of another size; all others are ignored from now on."""
        if samples == self._samples:
            return
        old = None
        if len(self._times_s) >= _LEAST_TIMES:
            old = (self._samples, self._median_s)
            self._slope = self._current_slope(old[1])
        self._old = old
        self._samples = samples
        self._times_s.clear()
        self._to_skip = _WARMUP

    def add(self, samples: int, seconds: float) -> None:
        """Take over the time of a batch."""
        if samples != self._samples:
            return
        if self._to_skip:
            self._to_skip -= 1
            return
        self._times_s.append(seconds)
        latest = list(self._times_s)[-_LEAST_TIMES:]
        if len(self._times_s) >= 2 * _LEAST_TIMES:
            before_s, now_s = statistics.median(list(self._times_s)[:-_LEAST_TIMES]), statistics.median(latest)
            if abs(now_s / before_s - 1.0) > _NEW_SPEED:
                self._times_s = deque(latest, maxlen=_MOST_TIMES)
                self._old = None
                if self._slope is not None:
                    self._slope *= now_s / before_s

    def measured(self) -> Measured | None:
        """The speed; None before there are enough times."""
        if len(self._times_s) < _LEAST_TIMES:
            return None
        median_s = self._median_s
        deviation_s = 1.4826 * statistics.median(abs(one - median_s) for one in self._times_s)
        error = 1.2533 * deviation_s / math.sqrt(len(self._times_s)) / median_s
        slope = self._current_slope(median_s)
        return Measured(Speed(median_s - slope * self._samples, slope), error)

    @property
    def _median_s(self) -> float:
        return statistics.median(self._times_s)

    def _current_slope(self, median_s: float) -> float:
        """Seconds per sample: from two sizes, or as known before, or as if time went to samples only."""
        of_all = median_s / self._samples
        slope = of_all if self._slope is None else self._slope
        if self._old is not None and abs(self._samples / self._old[0] - 1.0) >= _LEAST_DISTANCE:
            slope = (median_s - self._old[1]) / (self._samples - self._old[0])
        return min(max(slope, _LEAST_SLOPE * of_all), of_all)


def better_shares(
    measured: Sequence[Measured], sizes: Sequence[int], most: Sequence[int], *, dead_band: float
) -> tuple[list[int], float] | None:
    """Shares of the same batch with which the slowest rank is done clearly earlier, and how many times as fast it is.

    None if there are none.

    Args:
        measured: of each rank.
        sizes: what they have now.
        most: the most that each may get.
        dead_band: the least part of the time that must be gained.
    """
    speeds = [one.speed for one in measured]
    others = split(sum(sizes), speeds, most)
    now_s, then_s = longest_s(sizes, speeds), longest_s(others, speeds)
    least_gain = max(dead_band, _CERTAINTY * max(one.error for one in measured))
    return (others, now_s / then_s) if then_s < now_s * (1.0 - least_gain) else None
