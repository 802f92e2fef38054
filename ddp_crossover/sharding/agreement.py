"""What the ranks tell each other in each iteration of a sharded optimizer: what gather legs carry.

A rank may read gradients alone before ``step()``, as a logger on rank 0 does, or because its garbage collector has not
freed a view of a gradient yet. It then waits until the others get to where they ask, too: before norms are exchanged,
any number of times, and in their ``step()``. Once some rank has read gradients, all have them, and nobody asks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ddp_crossover.dear import Pipeline

EVERY_RANK = (
    "With shard_optimizer=True a read of gradients after step() gathers them from all ranks, so every rank must read "
    "them, at the same place: read them before step(), or let all ranks compute what rank 0 logs"
)


class Answer(NamedTuple):
    """What the ranks agree upon.

    Attributes:
        gathers_gradients: whether any rank reads gradients, so that all gather them.
        is_early_right: whether what ranks have updated on trial is right on all of them.
    """

    gathers_gradients: bool
    is_early_right: bool


class Agreement:
    """The agreement of one iteration after the other, by one number from each rank.

    Args:
        pipeline: counts iterations, and knows of waits.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._link = pipeline.link
        self._reached_in = -1
        self._is_early_wrong = False  # known to all ranks in this iteration

    @property
    def is_reached(self) -> bool:
        """Whether this rank has asked in this iteration, or has heard that gradients are gathered."""
        return self._reached_in == self._pipeline.iteration

    def begin_backward(self) -> None:
        """Begin an iteration, of which nothing is known."""
        self._is_early_wrong = False

    def ask(self, *, wants_gradients: bool, is_early_right: bool) -> Callable[[], Answer]:
        """Tell the other ranks, for the last time in this iteration; returns a function that waits for them."""
        self._reached_in = self._pipeline.iteration
        return self._tell(wants_gradients=wants_gradients, is_early_right=is_early_right and not self._is_early_wrong)

    def ask_before_exchange(self) -> Callable[[], Answer]:
        """Meet a rank that reads gradients first, and so waits for the others before it gets to the exchange.

        It may also read some afterwards, so ``step()`` asks again.
        """
        wait = self._tell(wants_gradients=False, is_early_right=False)
        self._is_early_wrong = True
        return wait

    def _tell(self, *, wants_gradients: bool, is_early_right: bool) -> Callable[[], Answer]:
        number = 4 * self._pipeline.iteration + 2 * wants_gradients + (not is_early_right)
        return functools.partial(self._hear, self._link.exchange_numbers(number))

    def _hear(self, wait: Callable[[], list[int]]) -> Answer:
        with waiting_for_ranks(self._pipeline):
            numbers = wait()
        if {number // 4 for number in numbers} != {self._pipeline.iteration}:
            raise RuntimeError(f"ranks are in different iterations. {EVERY_RANK}")
        gathers_gradients = any(number & 2 for number in numbers)
        if gathers_gradients:
            self._reached_in = self._pipeline.iteration
        return Answer(gathers_gradients, is_early_right=not any(number & 1 for number in numbers))

    def require_same_place(self) -> None:
        """Make sure that all ranks read gradients at this place.

        Raises:
            RuntimeError: if they do not.
        """
        with waiting_for_ranks(self._pipeline):
            numbers = self._link.exchange_numbers(-self._pipeline.iteration)()
        if set(numbers) != {-self._pipeline.iteration}:
            raise RuntimeError(f"ranks read gradients at different places. {EVERY_RANK}")


@contextlib.contextmanager
def waiting_for_ranks(pipeline: Pipeline) -> Iterator[None]:
    """Context in which this rank waits for what others send."""
    with pipeline.waiting("gradients"), pipeline.turns.released():
        yield
