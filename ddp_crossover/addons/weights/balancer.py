"""Follows the compute times of all ranks' batches, and changes their shares, on all ranks at the same batch."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ddp_crossover.addons.weights.sampler import BalancedSampler, BatchNumber
from ddp_crossover.addons.weights.speed import DEAD_BAND, BatchTimes, Measured, better_shares
from ddp_crossover.addons.weights.split import Speed
from ddp_crossover.log import say

# Batches from one look at the times of all ranks to the next.
_EVERY = 8
# A rank may draw so many batches between its part of a look and the decision; more wait for that.
_AHEAD = 2
# After a change a rank's line is known better, and smaller gains are worth one or two more.
_REFINED = 0.015
_MOST_CHANGES = 3
# Looks after which balance counts as settled, whatever times say: plans are made and tried then.
_MOST_LOOKS = 8
# Batches after which it is said that none of them had the size of the sampler's.
_UNTIL_SAID = 16
_NO_SPEED = -1
_EPOCH = 2**32
_PICO = 1e12
_MILLION = 1e6

Exchange = Callable[[int], Callable[[], list[int]]]


class Balancer:
    """Changes the shares of one sampler.

    Args:
        sampler: the sampler.
        exchange: sends a number to all ranks; returns a function that waits for theirs.

    Attributes:
        is_settled: whether a look has found that shares are right. All ranks find it at the same batch.
    """

    def __init__(self, sampler: BalancedSampler, exchange: Exchange) -> None:
        self._sampler = sampler
        self._exchange = exchange
        self._times = BatchTimes()
        self._batches = self._looks = self._changes = self._timed = 0
        self._has_timed_its_size = False
        self._was_right = self.is_settled = False
        self._waits: list[Callable[[], list[int]]] = []
        self._may_draw = BatchNumber(0, 0)
        sampler.follow_training(self._before_draw, self._decide)
        self._follow_sizes()

    def stop(self) -> None:
        """Leave the sampler alone: shares stay as they are."""
        self._waits = []
        self._sampler.follow_draws()

    def step_skipped(self, samples: int) -> None:
        """Note that a step of so many samples on this rank was left out. Called on all ranks."""
        self._sampler.count_trained(samples)

    def batch_ended(self, samples: int) -> None:
        """Note a step on so many samples of this rank. Called on all ranks at the same step."""
        self._sampler.count_trained(samples)
        self._decide()
        self._follow_sizes()
        self.is_settled = self.is_settled or self._was_right or self._looks >= _MOST_LOOKS
        self._batches += 1
        if self._batches % _EVERY == 0:
            self._look()

    def add_time(self, samples: int, seconds: float) -> None:
        """Take over the compute time of an earlier batch of this rank."""
        self._times.add(samples, seconds)
        self._has_timed_its_size = self._has_timed_its_size or samples == self._size
        self._timed += 1
        if self._timed == _UNTIL_SAID and not self._has_timed_its_size and self._sampler.rank == 0:
            self._say_that_sizes_differ(samples)

    def _follow_sizes(self) -> None:
        """Time batches of the size that is in force, whoever has changed it: a decision, or a checkpoint."""
        self._times.use_size(self._size)

    @property
    def _size(self) -> int:
        return self._sampler.sizes()[self._sampler.rank]

    def _look(self) -> None:
        """Tell all ranks the speed of this one, and how far its sampler is."""
        measured, drawn = self._times.measured(), self._sampler.drawn
        numbers = [_NO_SPEED, 0, 0]
        if measured is not None:
            speed = measured.speed
            numbers = [
                max(round(speed.base_s * _PICO), 0),
                max(round(speed.per_sample_s * _PICO), 1),
                round(measured.error * _MILLION),
            ]
        numbers.append(drawn.epoch * _EPOCH + drawn.batch + 1)
        self._may_draw = BatchNumber(drawn.epoch, drawn.batch + _AHEAD)
        self._waits = [self._exchange(number) for number in numbers]
        self._looks += 1

    def _before_draw(self, number: BatchNumber) -> None:
        if self._waits and number > self._may_draw:
            self._decide()

    def _decide(self) -> None:
        """Change shares if ranks have said so much that all of them come to the same decision."""
        if not self._waits:
            return
        bases, slopes, errors, drawn = (wait() for wait in self._waits)
        self._waits = []
        if _NO_SPEED in bases:
            return
        measured = [
            Measured(Speed(base / _PICO, slope / _PICO), error / _MILLION)
            for base, slope, error in zip(bases, slopes, errors, strict=True)
        ]
        sampler = self._sampler
        dead_band = _REFINED if 0 < self._changes < _MOST_CHANGES else DEAD_BAND
        better = better_shares(measured, sizes := sampler.sizes(), sampler.most, dead_band=dead_band)
        if better is None:
            if sampler.rank == 0 and not (self.is_settled or self._was_right):
                self._say_that_shares_are_right(sizes, [one.speed for one in measured])
            self._was_right = True
            return
        others, gain = better
        self._changes += 1
        epoch, batches = divmod(max(drawn), _EPOCH)
        sampler.use([one.speed for one in measured], BatchNumber(epoch, batches + _AHEAD))
        if sampler.rank == 0:
            say(
                f"ranks get {', '.join(map(str, others))} samples of a batch instead of "
                f"{', '.join(map(str, sizes))}: the slowest rank should compute {gain:.2f} times as fast"
            )

    def _say_that_sizes_differ(self, samples: int) -> None:
        say(
            f"shares stay equal, because state.batch({samples}) is not of a batch of the sampler, which has "
            f"{self._size} samples, so its time says nothing of how fast ranks are: give state.batch() the number of "
            "samples, not of tokens, and a batch() of its own to each batch of the sampler, or leave out "
            "state.balance()",
            logging.WARNING,
        )

    def _say_that_shares_are_right(self, sizes: list[int], speeds: list[Speed]) -> None:
        times_s = [speed.seconds(size) for size, speed in zip(sizes, speeds, strict=True)]
        shares = ", ".join(map(str, sizes))
        say(
            f"ranks compute for {min(times_s) * 1e3:.0f} to {max(times_s) * 1e3:.0f} ms with {shares} samples of a "
            "batch, and other shares would not clearly help: time beyond that goes to communication, and to moments in "
            "which a rank is slow"
        )
