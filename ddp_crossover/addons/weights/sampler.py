"""A batch sampler whose batches have other sizes on other ranks, together always the same samples."""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ddp_crossover.addons.weights.split import Speed, split
from ddp_crossover.log import say
from ddp_crossover.options import switched_off

_EQUAL = Speed(0.0, 1.0)
# So many batches are drawn before anything is said: a script may look at one, and workers draw ahead.
_UNTIL_SAID = 20


class BatchNumber(NamedTuple):
    """A batch of all ranks: number of the epoch, and number in it."""

    epoch: int
    batch: int


class _Shares(NamedTuple):
    """From which batch on ranks have which speeds, and the sizes of batches that follow, by their total."""

    since: BatchNumber
    speeds: list[Speed]
    sizes: dict[int, list[int]]


class BalancedSampler(Sampler[list[int]]):
    """Samples of this rank, as a ``batch_sampler`` of a ``DataLoader``: faster ranks get larger batches.

    The batches of all ranks together are the same as without balance, in the same order: batch ``k`` of an epoch is
    samples ``k * global_batch`` to ``(k + 1) * global_batch`` of the shuffled data set, of which each rank gets a part.
    A last batch with fewer samples is shared in the same way; if it has fewer samples than there are ranks, it is part
    of the one before.

    Shares are equal until ``state.balance(sampler)`` follows the compute times of a model that is attached with
    ``weighted=True``: then they are those with which the slowest rank is done earliest, for times of the form
    ``a + b * samples``, fitted on each rank. They change only if that clearly gains, mostly once or twice.

    Args:
        dataset: the data set, or its length.
        global_batch: number of samples of all ranks in a step.
        max_samples: the most samples that fit into the memory of a rank: one number, or one for each rank.
        shuffle: whether each epoch has an order of its own.
        drop_last: whether to leave out a last batch with fewer samples.
        seed: seed of the order, the same on all ranks.
        rank: this rank; by default, that of the default process group.
        world_size: number of ranks; by default, that of the default process group.

    Raises:
        TypeError: for numbers of samples that are not whole.
        ValueError: if a batch has fewer samples than there are ranks, or more than they take.

    Example::

        sampler = BalancedSampler(dataset, global_batch=256)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        state = attach(ddp, optimizer, weighted=True)
        state.balance(sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                with state.batch(len(x)):
                    loss_fn(ddp(x), y).backward()
                optimizer.step()
    """

    def __init__(
        self,
        dataset: Sized | int,
        global_batch: int,
        *,
        max_samples: int | Sequence[int] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.global_batch = _whole("global_batch", global_batch)
        self.world_size = dist.get_world_size() if world_size is None else world_size
        self.rank = dist.get_rank() if rank is None else rank
        self._samples = len(dataset) if isinstance(dataset, Sized) else _whole("dataset", dataset)
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._seed = seed
        if max_samples is None:
            max_samples = self._samples
        if not isinstance(max_samples, Sequence):
            max_samples = [max_samples] * self.world_size
        self.most = [_whole("max_samples", most) for most in max_samples]
        if len(self.most) != self.world_size:
            raise ValueError(
                f"max_samples must be one number, or one for each of {self.world_size} ranks, got {self.most}"
            )
        if min(self.most) < 1:
            raise ValueError(f"max_samples must be at least 1, because each rank takes part, got {self.most}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} is none of {self.world_size} ranks")
        if self.global_batch < self.world_size or self._samples < self.world_size:
            raise ValueError(
                f"each of {self.world_size} ranks needs a sample in every batch, got {self._samples} samples in "
                f"batches of {self.global_batch}"
            )
        self._totals = self._totals_of_epoch()
        if max(self._totals) > sum(self.most):
            raise ValueError(
                f"a batch has up to {max(self._totals)} samples, and ranks take at most {self.most}: choose a smaller "
                "global_batch, or a larger max_samples"
            )
        self._shares = [_Shares(BatchNumber(0, 0), [_EQUAL] * self.world_size, {})]
        self._epoch = 0
        self._is_epoch_set = False
        self._start = 0
        self._is_alone = True  # nothing has told it how fast ranks compute
        self._drawn_alone = 0
        self._trained: int | None = None
        self._to_train: deque[int] = deque()  # sizes of batches that were drawn and not trained on
        self.drawn = BatchNumber(0, -1)
        self._before_draw: Callable[[BatchNumber], None] = _nothing
        self._before_restart: Callable[[], None] = _nothing

    def _totals_of_epoch(self) -> list[int]:
        """How many samples each batch of an epoch has."""
        whole, rest = divmod(self._samples, self.global_batch)
        totals = [self.global_batch] * whole
        if rest and not (self._drop_last and totals):
            if rest >= self.world_size or not totals:
                totals.append(rest)
            else:
                totals[-1] += rest
        return totals

    def __len__(self) -> int:
        """Number of batches of an epoch, or of what is left of it after :meth:`load_state_dict`."""
        return len(self._totals) - self._start

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, batch by batch."""
        epoch, start = self._epoch, self._start
        self._start = 0
        if not self._is_epoch_set:
            self._epoch += 1  # the next one, if nobody says which
        if self._trained is not None:
            self._trained = start
            self._to_train.clear()
        if epoch < self.drawn.epoch:
            # Epochs are counted anew. All ranks know the same decisions here, which go on to hold.
            self._before_restart()
            self._shares = [_Shares(BatchNumber(epoch, 0), self._shares[-1].speeds, {})]
        order = self._order(epoch)
        for batch in range(start, len(self._totals)):
            number = BatchNumber(epoch, batch)
            self._before_draw(number)
            self._say_if_alone()
            self.drawn = number
            sizes = self.sizes(number)
            if self._trained is not None:
                self._to_train.append(sizes[self.rank])
            low = batch * self.global_batch + sum(sizes[: self.rank])
            yield order[low : low + sizes[self.rank]]

    def _say_if_alone(self) -> None:
        if not self._is_alone:
            return
        self._drawn_alone += 1
        if self._drawn_alone == _UNTIL_SAID and self.rank == 0 and self.world_size > 1 and not switched_off():
            say(
                "BalancedSampler gives all ranks equal shares, because nothing tells it how fast they compute: attach "
                "with weighted=True, and call state.balance(sampler)",
                logging.WARNING,
            )

    def __repr__(self) -> str:
        """Show the sizes of the next whole batch on all ranks."""
        shares = f"shares {self.sizes()}" if not self._is_alone else "equal shares, without state.balance(sampler)"
        return (
            f"BalancedSampler of {self._samples} samples in batches of {self.global_batch}; rank {self.rank} of "
            f"{self.world_size}; {shares}"
        )

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._samples))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(self._samples, generator=generator, device="cpu").tolist()
        return order

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; without it epochs are counted."""
        if epoch != self._epoch:
            self._start = 0  # what was loaded belongs to another epoch
        self._epoch = epoch
        self._is_epoch_set = True

    def sizes(self, number: BatchNumber | None = None) -> list[int]:
        """How many samples of a batch each rank gets; by default, of a whole one from now on."""
        if number is None:
            total, shares = min(self.global_batch, max(self._totals)), self._shares[-1]
        else:
            total = self._totals[number.batch]
            shares = next((one for one in reversed(self._shares) if one.since <= number), self._shares[0])
        if total not in shares.sizes:
            shares.sizes[total] = split(total, shares.speeds, self.most)
        return shares.sizes[total]

    # What a balancer calls.

    def use(self, speeds: Sequence[Speed], since: BatchNumber) -> None:
        """Share all batches from ``since`` on by these speeds. All ranks must do so, before they draw that batch."""
        self._shares = [*self._shares[-2:], _Shares(since, list(speeds), {})]

    def follow_training(self, before_draw: Callable[[BatchNumber], None], before_restart: Callable[[], None]) -> None:
        """From now on :meth:`state_dict` counts batches that were trained on, not those that were drawn.

        Args:
            before_draw: called before a batch is drawn.
            before_restart: called before an epoch with a lower number than the last one.
        """
        self._before_draw, self._before_restart = before_draw, before_restart
        self._is_alone = False
        if self._trained is None:
            self._trained = self._start if self.drawn.batch < self._start else self.drawn.batch + 1

    def follow_draws(self) -> None:
        """From now on :meth:`state_dict` counts batches that are drawn, and nobody changes shares."""
        self._before_draw = self._before_restart = _nothing
        self._trained = None
        self._to_train.clear()

    def count_trained(self, samples: int) -> None:
        """Note a step on so many samples, which may have been drawn long before.

        They are one batch, unless they are exactly as many as the first few ones that were drawn: a step may add up
        gradients of several.
        """
        batches = next((n for n, total in enumerate(accumulate(self._to_train), 1) if total == samples), 1)
        for _ in range(min(batches, len(self._to_train))):
            self._to_train.popleft()
        self._trained = (0 if self._trained is None else self._trained) + batches

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Where training is in the epoch, and the speeds of ranks; the same on all ranks.

        If ``state.balance(sampler)`` was called, batches count as done with the step that ends in
        :meth:`DearState.batch`, one or several in a step; one that the loop skips before that is not seen. Else they
        count when they are drawn, which a ``DataLoader`` with workers does ahead. Iterate once at a time.
        """
        batch = self.drawn.batch + 1 if self._trained is None else self._trained
        epoch = self.drawn.epoch if self.drawn.batch >= self._start else self._epoch
        if batch >= len(self._totals):
            epoch, batch = epoch + 1, 0
        return {
            "epoch": epoch,
            "batch": batch,
            **self._order_of_samples(),
            "speeds": [list(speed) for speed in self._shares[-1].speeds],
        }

    def _order_of_samples(self) -> dict[str, int | bool]:
        """What the samples of each batch depend on."""
        return {
            "seed": self._seed,
            "samples": self._samples,
            "global_batch": self.global_batch,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called: the next iteration is the rest of that epoch.

        Speeds of another number of ranks are dropped.

        Raises:
            ValueError: if it was another order of samples, or if what is left of the epoch is not enough for the ranks.
        """
        for name, ours in self._order_of_samples().items():
            if state.get(name, ours) != ours:
                raise ValueError(
                    f"this state has {name}={state[name]}, and the sampler {name}={ours}: samples would be left out or "
                    "repeated, so build the sampler as in the run that has saved it"
                )
        # Another number of ranks may have had a last batch of its own, which is too small for these.
        left = self._samples - state["batch"] * self.global_batch
        if not self._drop_last and left > 0 and state["batch"] >= len(self._totals):
            raise ValueError(
                f"this state has {left} samples left of epoch {state['epoch']}, and each of {self.world_size} ranks "
                f"needs one: go on with at most {left} ranks, or leave these samples out by loading the state with "
                f"epoch={state['epoch'] + 1} and batch=0"
            )
        self._epoch, self._start = state["epoch"], state["batch"]
        self.drawn = BatchNumber(self._epoch, self._start - 1)
        if self._trained is not None:
            self._trained = self._start
        if len(state["speeds"]) == self.world_size:
            self._shares = [_Shares(BatchNumber(0, 0), [Speed(*speed) for speed in state["speeds"]], {})]


def _whole(name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is a whole number of samples, got {number!r}") from None


def _nothing(*_: BatchNumber) -> None:
    pass
