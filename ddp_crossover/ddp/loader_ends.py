"""Loaders of different lengths on the ranks: until the last one is at its end, the others have no batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ddp_crossover.collectives.link import Link

_END = object()


def batches_of_all(loader: Iterable[Any], link: Link) -> Iterator[Any]:
    """Yield the batches of ``loader``, then None until no rank has any; see :meth:`DearState.batches`."""
    iterator = iter(loader)

    def fetch() -> tuple[Any, Callable[[], list[int]]]:
        if link.is_closed:
            raise RuntimeError(
                "the model was detached in a loop over state.batches(), whose ranks tell each other through it: leave "
                "the loop before state.detach()"
            )
        try:
            batch = next(iterator, _END)
        except Exception as error:
            batch = _Failed(error)  # raised when its turn comes: the batch before it is trained on
        return batch, link.exchange_numbers(batch is not _END)

    ahead = fetch()
    while any((batch_and_wait := ahead)[1]()):
        batch, _ = batch_and_wait
        if isinstance(batch, _Failed):
            raise batch.error
        ahead = fetch()  # ranks tell each other during the step whether there is another one
        yield None if batch is _END else batch


class _Failed(NamedTuple):
    """Stands for a batch that could not be loaded."""

    error: Exception
