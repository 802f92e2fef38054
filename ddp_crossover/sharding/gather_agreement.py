"""What the ranks tell each other in each iteration of a sharded optimizer: what gather legs carry.

A rank may read gradients alone before ``step()``, as a logger on rank 0 does, or because its garbage collector has not
freed a view of a gradient yet. It then waits until the others get to where they ask, too: before norms are exchanged,
any number of times, and in their ``step()``. Once some rank has read gradients, all have them, and nobody asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ddp_crossover.dear import Pipeline

EVERY_RANK = (
    "With shard_optimizer=True a read of gradients after step() gathers them from all ranks, so every rank must read "
    "them, at the same place: read them before step(), or let all ranks compute what rank 0 logs"
)


class GatherAgreement:
    """The agreement of one iteration after the other, by one number from each rank.

    Args:
        pipeline: counts iterations, and knows of waits.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._link = pipeline.link
        self._reached_in = -1

    @property
    def is_reached(self) -> bool:
        """Whether this rank has asked in this iteration, or has heard that gradients are gathered."""
        return self._reached_in == self._pipeline.iteration

    def ask(self, *, wants_gradients: bool) -> bool:
        """Ask for the last time in this iteration: does any rank read gradients, so that all gather them?"""
        self._reached_in = self._pipeline.iteration
        return self._ask(wants_gradients=wants_gradients)

    def ask_before_exchange(self) -> bool:
        """Meet a rank that reads gradients first, and so waits for the others before it gets to the exchange.

        It may also read some afterwards, so ``step()`` asks again.
        """
        return self._ask(wants_gradients=False)

    def _ask(self, *, wants_gradients: bool) -> bool:
        with waiting_for_ranks(self._pipeline):
            numbers = self._link.exchange_numbers(2 * self._pipeline.iteration + wants_gradients)()
        if {number // 2 for number in numbers} != {self._pipeline.iteration}:
            raise RuntimeError(f"ranks are in different iterations. {EVERY_RANK}")
        gathers_gradients = any(number & 1 for number in numbers)
        if gathers_gradients:
            self._reached_in = self._pipeline.iteration
        return gathers_gradients

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
    with pipeline.waits.of("gradients"), pipeline.turns.released():
        yield
