"""Ranks that compute slowly, always or for moments, and an arm that shares work unequally.

All arms of a case see the same moments: what slows a rank down in the nth step of a turn is drawn from a seed of turn
and rank.
"""

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import ddp_crossover as dx
from bench_kit.paced import Pace
from bench_kit.training import Arm, Workload

SAMPLES = 64
"""Samples of a rank's batch where all ranks have equally many. Compute takes time in proportion to samples."""
BALANCED_STEPS = 70
"""Steps after which balance has settled: a few looks at the times, eight steps apart."""
FORMS = "slow@FACTOR: the last rank is slower by it; stalls@PROBABILITY: a rank's step takes 3 times as long"
_STALL = 3.0
_SEED = 7


class Straggler(NamedTuple):
    """What slows ranks down: with this probability in each step, the last rank alone or any of them."""

    factor: float
    probability: float
    is_last_rank: bool

    @classmethod
    def parse(cls, text: str) -> "Straggler":
        """Raises ValueError for what is none of `FORMS`."""
        kind, _, number = text.partition("@")
        value = float(number) if kind in ("slow", "stalls") else 0.0
        if kind == "slow" and value >= 1.0:
            return cls(value, 1.0, True)
        if kind == "stalls" and 0.0 < value < 1.0:
            return cls(_STALL, value, False)
        raise ValueError(f"{text} is no straggler: {FORMS}")


def slowness(straggler: Straggler, turn: int, rank: int, world_size: int) -> Iterator[float]:
    """By which factor each step of a turn takes longer on a rank."""
    draw = random.Random(f"{_SEED} {turn} {rank}")
    concerns_rank = rank == world_size - 1 or not straggler.is_last_rank
    while True:
        yield straggler.factor if concerns_rank and draw.random() < straggler.probability else 1.0


class SlowedArm(Arm):
    """An arm on ranks that may be slow, with equal shares of work; see `Arm`."""

    def __init__(
        self,
        workload: Workload,
        network: nn.Module,
        optimizer: Optimizer,
        state: dx.DearState | None,
        straggler: Straggler,
    ) -> None:
        super().__init__(workload, network, optimizer, state)
        assert workload.pace is not None
        self._pace: Pace = workload.pace
        self._straggler = straggler
        self._turns = self._steps = 0
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._slowness = slowness(self._straggler, self._turns, dist.get_rank(), dist.get_world_size())
        self._turns += 1

    def turn_s(self, steps: int) -> float:
        self._begin_turn()
        return super().turn_s(steps)

    def step(self) -> None:
        self._steps += 1
        slower = next(self._slowness)
        try:
            self._step(slower)
        finally:
            self._pace.factor = 1.0

    def _step(self, slower: float) -> None:
        self._pace.factor = slower
        super().step()


class BalancedArm(SlowedArm):
    """Ranks get as many samples as they are fast."""

    def __init__(
        self, workload: Workload, network: nn.Module, optimizer: Optimizer, state: dx.DearState, straggler: Straggler
    ) -> None:
        super().__init__(workload, network, optimizer, state, straggler)
        self._state = state
        self._sampler = dx.BalancedSampler(2**20, SAMPLES * dist.get_world_size())
        state.balance(self._sampler)
        self._batches = itertools.chain.from_iterable(itertools.repeat(self._sampler))

    def _step(self, slower: float) -> None:
        samples = len(next(self._batches))
        self._pace.factor = slower * samples / SAMPLES
        self.optimizer.zero_grad()
        with self._state.batch(samples):
            self._workload.loss(self._network).backward()
        self.optimizer.step()

    def _is_settled(self) -> bool:
        return super()._is_settled() and self._steps >= BALANCED_STEPS

    def facts(self) -> dict[str, object]:
        return super().facts() | {"shares": self._sampler.sizes()}
