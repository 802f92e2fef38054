"""One batch that all ranks share: each takes the next micro-batch when it is done with its last one.

A rank that is slow for a moment takes fewer. Tickets are numbers of micro-batches, drawn from a counter in the job's
store. One ticket is taken ahead, so that a rank knows its last micro-batch, in whose backward gradients are reduced.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.collectives.link import Link
from ddp_crossover.ddp.no_data import why_not_without_data
from ddp_crossover.ddp.weighted_batches import WeightedBatches
from ddp_crossover.log import say
from ddp_crossover.torch_internals.store import Store


class _Tickets(Protocol):
    """Where tickets of this rank come from."""

    def next(self) -> int | None:
        """The next one, in ascending order; None if there are no more."""


class _Counter:
    """A counter that all ranks draw from. The first ticket of each rank is its number, so that nobody waits for it.

    Args:
        store: keeps the counter.
        key: its name, which must be new.
        link: knows the ranks.
        count: number of tickets.
    """

    def __init__(self, store: Store, key: str, link: Link, count: int) -> None:
        self._store = store
        self._key = key
        self._first: int | None = link.rank
        self._world_size = link.world_size
        self._count = count

    def next(self) -> int | None:
        ticket, self._first = self._first, None
        if ticket is None:
            ticket = self._world_size + self._store.add(self._key, 1) - 1
        return ticket if ticket < self._count else None


class _Written:
    """Tickets that were written down in an earlier run.

    Args:
        tickets: those of this rank.
        link: with which ranks find out whether each ticket is there once.
        count: number of tickets of all ranks.

    Raises:
        ValueError: on all ranks, if a ticket is missing, or there twice.
    """

    def __init__(self, tickets: Sequence[int], link: Link, count: int) -> None:
        own = [int(ticket) for ticket in tickets]
        rows = link.exchange_numbers(len(own))()
        others = [
            link.exchange_numbers(own[place] if place < len(own) else -1)() for place in range(max(rows, default=0))
        ]
        of_ranks = [[row[rank] for row in others[: rows[rank]]] for rank in range(link.world_size)]
        taken = sorted(itertools.chain.from_iterable(of_ranks))
        if taken != list(range(count)) or any(own != sorted(own) for own in of_ranks):
            raise ValueError(
                f"tickets= must hold each of the numbers 0 to {count - 1} on one rank, in ascending order, and ranks "
                f"have {of_ranks}: replay the tickets that share() has given out for a batch of this size, on the "
                "same rank"
            )
        self._own = iter(own)

    def next(self) -> int | None:
        return next(self._own, None)


class _Micro(NamedTuple):
    """A micro-batch: the range of its samples."""

    low: int
    high: int

    @property
    def samples(self) -> int:
        return self.high - self.low


class Cut(NamedTuple):
    """How a batch is cut into micro-batches: first one of `first` samples for each rank, then as many of `size`."""

    length: int
    size: int
    first: int
    world_size: int

    @property
    def tickets(self) -> int:
        """Number of micro-batches."""
        in_first = min(self.length, self.world_size * self.first)
        return -(-in_first // self.first) - (in_first - self.length) // self.size

    def micro(self, ticket: int) -> _Micro:
        """The micro-batch of a ticket."""
        after_first = ticket - self.world_size
        if after_first < 0:
            low, size = ticket * self.first, self.first
        else:
            low, size = self.world_size * self.first + after_first * self.size, self.size
        return _Micro(low, min(low + size, self.length))


class SharedBatch:
    """The micro-batches that this rank takes of a shared batch; iterate over it once.

    Args:
        ddp: the model.
        batches: weights the gradients of micro-batches.
        link: tells ranks what they need of each other.
        data: what is shared; see :meth:`DearState.share`.
        size: number of samples of a micro-batch.
        first: the same of the first one of each rank; None: as of the others.
        tickets: what this rank has to take; None: what comes.
        store: keeps a counter.
        number: how many shared batches there were, with this one.

    Attributes:
        tickets: those that this rank has taken so far, to be written down and replayed.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        batches: WeightedBatches,
        link: Link,
        data: Any,
        size: int,
        *,
        first: int | None,
        tickets: Sequence[int] | None,
        store: Store,
        number: int,
    ) -> None:
        cut = Cut(_length(data), size, size if first is None else first, link.world_size)
        self.tickets: list[int] = []
        self._ddp = ddp
        self._batches = batches
        self._data = data
        self._cut = cut
        self._of_step = {"total": cut.length, "share": number}
        for name in ("size", "first"):
            if (count := getattr(cut, name)) < 1:
                raise ValueError(f"share() takes numbers of samples of a micro-batch, at least 1, got {name}={count}")
        if not cut.length:
            raise ValueError("share() got a batch without samples: leave out the step on all ranks")
        if cut.tickets < cut.world_size and (setting := why_not_without_data(ddp)) is not None:
            raise ValueError(
                f"share() has {cut.tickets} micro-batches for {cut.world_size} ranks, and with {setting}=True DDP "
                "needs a forward of each rank: choose a smaller size="
            )
        self._source: _Tickets | None = (
            _Counter(store, f"batch {number}", link, cut.tickets)
            if tickets is None
            else _Written(tickets, link, cut.tickets)
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield micro-batches, structured as the batch is. Gradients are reduced in the backward of the last one."""
        if self._source is None:
            raise RuntimeError("this shared batch has been iterated over: call state.share() for each batch")
        source, self._source = self._source, None
        if not self._ddp.require_backward_grad_sync:
            raise RuntimeError("share() calls no_sync() by itself, for all but the last micro-batch: leave it out")
        self._refuse_gradients()
        try:
            yield from self._micro_batches(source)
        except GeneratorExit:
            # The loop was left, by `break`: a step with gradients of this rank alone would part it from the others.
            if not self._batches.has_reduced:
                for parameter in self._ddp.module.parameters():
                    parameter.grad = None
                say(
                    "the loop over state.share() was left before the last micro-batch of this rank, so this step has "
                    "no gradients: all ranks have to leave it, and the other samples of the batch are lost",
                    logging.WARNING,
                )
            raise

    def _micro_batches(self, source: _Tickets) -> Iterator[Any]:
        micro = self._next(source)
        if micro is None:
            with self._batches.batch(0, weight=0, **self._of_step):
                pass
            return
        while (following := self._next(source)) is not None:
            with self._ddp.no_sync(), self._batches.batch(micro.samples, weight=0):
                yield self._samples(micro)
            if following.samples != micro.samples:
                self._scale_gradients(micro.samples / following.samples)
            micro = following
        with self._batches.batch(micro.samples, weight=micro.samples, **self._of_step):
            yield self._samples(micro)
            self._batches.require_reduced()

    def _next(self, source: _Tickets) -> _Micro | None:
        ticket = source.next()
        if ticket is None:
            return None
        self.tickets.append(ticket)
        return self._cut.micro(ticket)

    def _samples(self, micro: _Micro) -> Any:
        return _part(self._data, micro.low, micro.high)

    def _refuse_gradients(self) -> None:
        for name, parameter in self._ddp.module.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                raise RuntimeError(
                    f"share() adds up gradients of micro-batches in .grad, and {name} has one already: call "
                    "optimizer.zero_grad() before it, with set_to_none=True; to add up several batches in a step, "
                    "share one of all their samples"
                )

    @torch.no_grad()
    def _scale_gradients(self, factor: float) -> None:
        """Have a sample in ``.grad`` count as much as in the mean over another number of samples, which comes next."""
        gradients = [p.grad for p in self._ddp.module.parameters() if p.requires_grad and p.grad is not None]
        torch._foreach_mul_(gradients, factor)


def _length(data: Any) -> int:
    """Number of samples.

    Raises:
        TypeError, ValueError: if that is not clear.
    """
    if isinstance(data, Tensor):
        if not data.dim():
            raise ValueError("share() got a tensor without dimensions: the first dimension is that of the samples")
        return len(data)
    if isinstance(data, Mapping):
        return _same_length(list(data.values()))
    if isinstance(data, tuple):
        return _same_length(list(data))
    if isinstance(data, Sequence) and not isinstance(data, str):
        if any(isinstance(part, (Tensor, list)) for part in data):
            raise TypeError(
                "share() got a list of tensors or lists, which may be the columns of a batch, as a DataLoader makes "
                "them, or its samples: pass tuple(batch) for columns; for samples, their indices"
            )
        return len(data)
    raise TypeError(
        f"share() takes a tensor, a list of samples, or a tuple or dict of these, got {type(data).__name__}: pass the "
        "indices of the samples, and load them in the loop"
    )


def _same_length(parts: list[Any]) -> int:
    lengths = {_length(part) for part in parts}
    if len(lengths) != 1:
        raise ValueError(f"share() got parts with different numbers of samples: {sorted(lengths)}")
    return lengths.pop()


def _part(data: Any, low: int, high: int) -> Any:
    if isinstance(data, Mapping):
        return {key: _part(value, low, high) for key, value in data.items()}
    if isinstance(data, tuple):
        parts = [_part(value, low, high) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    return data[low:high]
