"""What a state does for batches of different sizes; ``DearState`` documents it.

On a state that is detached, loops go on as far as plain DDP, which weights ranks equally, is right for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ddp_crossover.balance.balancer import Balancer
from ddp_crossover.balance.sampler import BalancedSampler
from ddp_crossover.collectives.link import Link
from ddp_crossover.ddp.batch_timer import BatchTimer
from ddp_crossover.ddp.equal_batches import batches_of_equal_ranks, require_equal
from ddp_crossover.ddp.loader_ends import batches_of_all
from ddp_crossover.ddp.reducer import Reducer
from ddp_crossover.ddp.weighted_batches import WeightedBatches
from ddp_crossover.gpu_sharing.turns import Turns
from ddp_crossover.options import SWITCH, switched_off


class WeightedTraining:
    """Batches, loaders and a balanced sampler of one model.

    Args:
        reducer: knows the model, and weights its gradients.
        link: tells ranks what they need of each other.
        turns: knows of waits.
        device: the device that computes.
    """

    def __init__(self, reducer: Reducer, link: Link, turns: Turns, device: torch.device) -> None:
        self._reducer = reducer
        self._link = link
        self._turns = turns
        self._device = device

    def batch(self, samples: int) -> AbstractContextManager[None]:
        """See :meth:`DearState.batch`."""
        return self._equal_batch(samples) if self._reducer.is_detached else self._batches("batch").batch(samples)

    @contextmanager
    def _equal_batch(self, samples: int) -> Iterator[None]:
        left_over = 0 if self._reducer.batches is None else self._reducer.batches.take_left_over()
        require_equal(samples + left_over, self._reducer.model, self._device)
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
        batches.timer = BatchTimer(self._reducer.model.module, self._device, self._turns, balancer)

    def _batches(self, name: str) -> WeightedBatches:
        if self._reducer.is_detached:
            why = f"{SWITCH}=off is set" if switched_off() else "this state is detached"
            raise RuntimeError(f"state.{name}() weights gradients, and {why}, so DDP averages over ranks")
        if self._reducer.batches is None:
            raise RuntimeError(f"state.{name}() weights gradients by the number of samples: attach with weighted=True")
        return self._reducer.batches
