"""How many samples' gradients are in ``.grad`` and have not been reduced, as after ``no_sync()``.

The weight of a rank is the number of samples whose gradients it sends. What a script does to ``.grad`` between
micro-batches, or what a batch that raises has left there, changes it. So it is taken from the gradients themselves, by
what was written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from ddp_crossover.pending.gradient_marks import Mark, are_empty, are_same, marks_of

_PART = (
    "a state.batch() ended after the backward of some of its micro-batches, and before that of the others, so how many "
    "samples' gradients are in .grad is not known: call optimizer.zero_grad() before the next forward, and repeat the "
    "step"
)


class UnreducedSamples:
    """Counts the samples of one model's batches.

    Args:
        parameters: gives its parameters.

    Attributes:
        number: how many samples, with those of the batch under way.
        earlier: the same without it.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self.number = self.earlier = 0
        self._is_part = False
        self._unsynced_forwards = 0
        # The gradients before the first backward of the batch under way that is not reduced, if there may be one, and
        # those after the last batch.
        self._before: list[Mark | None] | None = None
        self._left: list[Mark | None] = []
        self._left_is_empty = True

    def begin_batch(self, count: int, *, is_unsynced: bool) -> None:
        """Note a batch of ``count`` samples; under ``no_sync()`` its backward may add to gradients without DDP."""
        self.earlier = self.number
        self.number += count
        self._unsynced_forwards = 0
        self._before = marks_of(self._parameters()) if is_unsynced else None

    def forward_begins(self, *, reduces: bool) -> None:
        """Note a forward, before the backward that is going to add up with what is in ``.grad``.

        Raises:
            RuntimeError: if that is a part of a batch.
        """
        self.forget_what_was_dropped()
        if self._is_part:
            raise RuntimeError(_PART)
        if not reduces:
            if not self._unsynced_forwards:
                self._before = marks_of(self._parameters())
            self._unsynced_forwards += 1

    def end_batch(self, *, is_whole: bool, has_raised: bool = False) -> None:
        """Note that the batch under way has ended without a reduced backward.

        Args:
            is_whole: whether gradients in ``.grad`` are those of all of its samples.
            has_raised: whether an error has ended it; then of several forwards some may have had no backward.
        """
        if self._before is None:
            self.number = self.earlier
            return
        self.forget_what_was_dropped()
        self._left = marks_of(self._parameters())
        self._left_is_empty = are_empty(self._parameters())
        was_dropped = self._left_is_empty and (has_raised or not any(self._left))
        if was_dropped or are_same(self._before, self._left):
            self.number = self.earlier  # no backward
        elif not is_whole or (has_raised and self._unsynced_forwards > 1):
            self._is_part = True
        self._before = None

    def are_reduced(self) -> None:
        """Note that a reduced backward has taken all gradients."""
        self.number = 0
        self._is_part = False
        self._before, self._left = None, []

    def take(self) -> int:
        """Number of samples; from now on none.

        Raises:
            RuntimeError: if a part of a batch is among them.
        """
        self.earlier = self.number
        self.forget_what_was_dropped()
        if self._is_part:
            raise RuntimeError(_PART)
        number, self.number = self.number, 0
        return number

    def forget_what_was_dropped(self) -> bool:
        """Count no samples of earlier batches whose gradients were set to None or to zeros since; returns whether."""
        if not (self.earlier or self._is_part) or not are_empty(self._parameters()):
            return False
        # Zeros may be what backward has left there; they are written by `.data`, too, which no version tells.
        if self._left_is_empty and are_same(self._left, marks_of(self._parameters())):
            return False
        self.number -= self.earlier
        self.earlier = 0
        self._is_part = False
        return True
