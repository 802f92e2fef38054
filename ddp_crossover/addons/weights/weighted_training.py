"""What a state does for batches of different sizes; ``DearState`` documents it.

On a state that is detached, loops go on as far as plain DDP, which weights ranks equally, is right for them: batches of
equal sizes, equally many. Where loaders are of different lengths, ranks have no batch until the last one is at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.addons.weights.balancer import Balancer
from ddp_crossover.addons.weights.batch_timer import BatchTimer
from ddp_crossover.addons.weights.sampler import BalancedSampler
from ddp_crossover.addons.weights.weighted_batches import WeightedBatches, checked_count
from ddp_crossover.comm.link import Link
from ddp_crossover.hook.reducer import Reducer
from ddp_crossover.moments import Moments
from ddp_crossover.options import SWITCH, switched_off

_END = object()
_WAY_OUT = "attach with weighted=True, without DDP_CROSSOVER=off, or give all ranks equal batches"


def batches_of_equal_ranks(loader: Iterable[Any], ddp: DistributedDataParallel, device: torch.device) -> Iterator[Any]:
    """Yield the batches of ``loader``; plain DDP cannot train with a rank that has none.

    Raises:
        RuntimeError: on all ranks, when some have a batch and others have none.
    """
    iterator = iter(loader)
    while True:
        batch = next(iterator, _END)
        least, most = _least_and_most(int(batch is not _END), ddp, device)
        if least != most:
            raise RuntimeError(
                "state.batches(): some ranks have no batch left, and the model is not attached, so DDP would wait for "
                f"them: {_WAY_OUT}"
            )
        if not most:
            return
        yield batch


def _least_and_most(number: int, ddp: DistributedDataParallel, device: torch.device) -> tuple[int, int]:
    least_and_most = torch.tensor([-number, number], device=device)
    dist.all_reduce(least_and_most, dist.ReduceOp.MAX, group=ddp.process_group)
    least, most = least_and_most.tolist()
    return -least, most


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

    ahead, of_ranks = fetch()
    while any(of_ranks()):
        batch = ahead
        if isinstance(batch, _Failed):
            raise batch.error
        ahead, of_ranks = fetch()  # ranks tell each other during the step whether there is another one
        yield None if batch is _END else batch


class _Failed(NamedTuple):
    """Stands for a batch that could not be loaded."""

    error: Exception


class WeightedTraining:
    """Batches, loaders and a balanced sampler of one model.

    Args:
        reducer: knows the model, and whether it is attached.
        weighted: the batches of this model, if they are weighted; else None.
        link: tells ranks what they need of each other.
        moments: those of the model's training.
        device: the device that computes.
    """

    def __init__(
        self, reducer: Reducer, weighted: WeightedBatches | None, link: Link, moments: Moments, device: torch.device
    ) -> None:
        self._reducer = reducer
        self._weighted = weighted
        self._link = link
        self._moments = moments
        self._device = device

    def batch(self, samples: int) -> AbstractContextManager[None]:
        """See :meth:`DearState.batch`."""
        return self._equal_batch(samples) if self._reducer.is_detached else self._batches("batch").batch(samples)

    @contextmanager
    def _equal_batch(self, samples: int) -> Iterator[None]:
        """Plain DDP, which weights ranks equally, is right for this batch, or all ranks raise RuntimeError."""
        left_over = 0 if self._weighted is None else self._weighted.take_left_over()
        least, most = _least_and_most(checked_count(samples + left_over), self._reducer.model, self._device)
        if least != most:
            raise RuntimeError(
                f"ranks have from {least} to {most} samples in this batch, and the model is not attached, so DDP would "
                f"weight ranks equally: {_WAY_OUT}"
            )
        yield

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """See :meth:`DearState.batches`."""
        if self._reducer.is_detached:
            return batches_of_equal_ranks(loader, self._reducer.model, self._device)
        self._batches("batches")
        return batches_of_all(loader, self._link)

    def balance(self, sampler: BalancedSampler) -> None:
        """See :meth:`DearState.balance`."""
        if switched_off():
            return
        batches = self._batches("balance")
        if (sampler.rank, sampler.world_size) != (self._link.rank, self._link.world_size):
            raise ValueError(
                f"the sampler is that of rank {sampler.rank} of {sampler.world_size}, and the model has rank "
                f"{self._link.rank} of {self._link.world_size}: give the sampler rank= and world_size="
            )
        if batches.timer is not None:
            raise RuntimeError("state.balance() was called before: one sampler is balanced for a model")
        balancer = Balancer(sampler, self._link.exchange_numbers)
        batches.timer = BatchTimer(self._moments, self._device, balancer)

    def _batches(self, name: str) -> WeightedBatches:
        if self._reducer.is_detached:
            why = f"{SWITCH}=off is set" if switched_off() else "this state is detached"
            raise RuntimeError(f"state.{name}() weights gradients, and {why}, so DDP averages over ranks")
        if self._weighted is None:
            raise RuntimeError(f"state.{name}() weights gradients by the number of samples: attach with weighted=True")
        return self._weighted
