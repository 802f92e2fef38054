"""Balance, with the times of simulated ranks: it settles soon, at the best shares, and stays there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_crossover.addons.weights.balancer import Balancer
from ddp_crossover.addons.weights.sampler import BalancedSampler
from ddp_crossover.addons.weights.split import Speed, longest_s, split

GLOBAL_BATCH = 128


class Wire:
    """Numbers that ranks exchange; nobody may wait before all have sent."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[list[int]] = [[] for _ in range(ranks)]

    def of(self, rank: int) -> Callable[[int], Callable[[], list[int]]]:
        def exchange(value: int) -> Callable[[], list[int]]:
            self.sent[rank].append(value)
            number = len(self.sent[rank]) - 1
            return lambda: [row[number] for row in self.sent]

        return exchange


class Ranks:
    """Ranks with samplers and balancers, and compute times that follow from the sizes of their batches."""

    def __init__(self, speeds: list[Speed], noise: float = 0.0, ahead: int = 2, **options: object) -> None:
        self.speeds = speeds
        self.noise = noise
        ranks = len(speeds)
        wire = Wire(ranks)
        self.samplers = [
            BalancedSampler(4096, GLOBAL_BATCH, rank=rank, world_size=ranks, **options) for rank in range(ranks)
        ]
        self.balancers = [Balancer(one, wire.of(rank)) for rank, one in enumerate(self.samplers)]
        self.random = random.Random(1)
        self.ahead = ahead
        self.sizes: list[list[int]] = []
        self.seen: list[list[int]] = []

    def train(self, epochs: int) -> list[list[int]]:
        """Train; returns the sizes of all batches."""
        for _ in range(epochs):
            loaders = [iter(one) for one in self.samplers]
            # As a DataLoader with workers, each rank draws ahead; ranks need not draw equally far ahead.
            drawn = [[next(loader) for _ in range(self.ahead + rank)] for rank, loader in enumerate(loaders)]
            for _ in range(len(self.samplers[0])):
                batches = [queue.pop(0) for queue in drawn]
                self.sizes.append([len(one) for one in batches])
                self.seen.append(list(itertools.chain(*batches)))
                for rank, balancer in enumerate(self.balancers):
                    seconds = self.speeds[rank].seconds(len(batches[rank]))
                    balancer.add_time(len(batches[rank]), seconds * self.random.gauss(1.0, self.noise))
                    balancer.batch_ended(len(batches[rank]))
                for queue, loader in zip(drawn, loaders, strict=True):
                    if (following := next(loader, None)) is not None:
                        queue.append(following)
        return self.sizes

    @property
    def changes(self) -> int:
        """How often sizes have changed."""
        return sum(one != other for one, other in zip(self.sizes, self.sizes[1:], strict=False))


def _best_s(speeds: list[Speed]) -> float:
    return longest_s(split(GLOBAL_BATCH, speeds, [GLOBAL_BATCH] * len(speeds)), speeds)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.builds(Speed, st.floats(0.0, 0.3), st.floats(0.002, 0.02)), min_size=2, max_size=6),
    st.sampled_from([0.0, 0.01]),
)
def test_it_settles_after_at_most_three_changes_near_the_best_shares(speeds, noise) -> None:
    ranks = Ranks(speeds, noise)
    sizes = ranks.train(10)
    assert ranks.changes <= 3
    assert longest_s(sizes[-1], speeds) <= 1.08 * _best_s(speeds)
    assert all(sum(one) == GLOBAL_BATCH for one in sizes)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(0, 10**6))
def test_equal_ranks_with_noise_of_5_percent_keep_equal_shares(count, seed) -> None:
    ranks = Ranks([Speed(0.1, 0.01)] * count, noise=0.05)
    ranks.random.seed(seed)
    assert ranks.train(20) and ranks.changes == 0


@pytest.mark.parametrize("seed", range(3))
def test_unequal_ranks_with_noise_of_5_percent_do_not_oscillate(seed) -> None:
    speeds = [Speed(0.05, 0.01), Speed(0.05, 0.02), Speed(0.1, 0.013)]
    ranks = Ranks(speeds, noise=0.05)
    ranks.random.seed(seed)
    sizes = ranks.train(20)
    assert 1 <= ranks.changes <= 3
    assert longest_s(sizes[-1], speeds) <= 1.08 * _best_s(speeds)


@pytest.mark.parametrize("speed", [0.02, 0.005])
def test_it_follows_a_rank_whose_speed_changes(speed) -> None:
    ranks = Ranks([Speed(0.0, 0.01), Speed(0.0, 0.01)])
    ranks.train(2)
    assert ranks.changes == 0
    ranks.speeds = [Speed(0.0, 0.01), Speed(0.0, speed)]
    sizes = ranks.train(4)
    assert longest_s(sizes[-1], ranks.speeds) <= 1.05 * _best_s(ranks.speeds)


def test_stalls_of_moments_change_nothing() -> None:
    class Stalling(Ranks):
        def train(self, epochs: int) -> list[list[int]]:
            draw = random.Random(3)
            self.random.gauss = lambda mean, deviation: 3.0 if draw.random() < 0.1 else 1.0  # type: ignore[method-assign]
            return super().train(epochs)

    ranks = Stalling([Speed(0.0, 0.01)] * 3)
    ranks.train(20)
    assert ranks.changes == 0


def test_every_sample_comes_once_in_the_same_order_whatever_the_shares() -> None:
    speeds = [Speed(0.0, 0.01), Speed(0.1, 0.03), Speed(0.0, 0.02)]
    balanced, equal = Ranks(speeds), Ranks([Speed(0.0, 0.01)] * 3)
    balanced.train(5)
    equal.train(5)
    assert balanced.changes
    assert not equal.changes
    assert [sorted(one) for one in balanced.seen] == [sorted(one) for one in equal.seen]
    per_epoch = len(balanced.seen) // 5
    for epoch in range(5):
        samples = itertools.chain(*balanced.seen[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert sorted(samples) == list(range(4096))


def test_memory_limits_a_share() -> None:
    ranks = Ranks([Speed(0.0, 0.01), Speed(0.0, 0.04)], max_samples=[80, 128])
    assert ranks.train(5)[-1] == [80, 48]


@pytest.mark.parametrize("ahead", [1, 2, 6])
def test_all_ranks_change_at_the_same_batch_however_far_they_draw_ahead(ahead) -> None:
    ranks = Ranks([Speed(0.0, 0.01), Speed(0.0, 0.02), Speed(0.0, 0.02)], ahead=ahead)
    assert all(sum(one) == GLOBAL_BATCH for one in ranks.train(5))
    assert ranks.changes


def test_shares_hold_when_epochs_are_counted_anew() -> None:
    ranks = Ranks([Speed(0.0, 0.001), Speed(0.0, 0.002)])
    for epoch in (5, 6, 0, 1):
        for one in ranks.samplers:
            one.set_epoch(epoch)
        ranks.train(1)
    per_epoch = len(ranks.samplers[0])
    assert ranks.sizes[2 * per_epoch] == ranks.sizes[2 * per_epoch - 1] != [64, 64]
    assert longest_s(ranks.sizes[-1], ranks.speeds) < 1.05 * _best_s(ranks.speeds)


def test_it_goes_on_with_the_speeds_of_a_checkpoint() -> None:
    speeds = [Speed(0.0, 0.001), Speed(0.0, 0.002)]
    (before := Ranks(speeds)).train(1)
    ranks = Ranks([Speed(0.0, 0.002), Speed(0.0, 0.001)])  # another machine is slow now
    for one in ranks.samplers:
        one.load_state_dict(before.samplers[0].state_dict())
    sizes = ranks.train(1)
    assert sizes[0] == before.sizes[-1]
    assert longest_s(sizes[-1], ranks.speeds) < 1.05 * _best_s(ranks.speeds)


def test_it_says_that_it_learns_nothing_from_numbers_of_tokens(caplog) -> None:
    sampler = BalancedSampler(4096, GLOBAL_BATCH, rank=0, world_size=2)
    balancer = Balancer(sampler, lambda number: lambda: [number, number])
    for _ in range(40):
        balancer.add_time(samples=1000, seconds=0.1)
        balancer.batch_ended(1000)
    assert caplog.text.count("state.batch(1000) is not of a batch of the sampler, which has 64 samples") == 1


def test_it_says_nothing_of_batches_of_its_sizes(caplog) -> None:
    Ranks([Speed(0.01, 0.001), Speed(0.01, 0.004)], ahead=20).train(epochs=2)
    assert "is not of a batch of the sampler" not in caplog.text


def test_it_says_that_other_shares_would_not_help(caplog) -> None:
    caplog.set_level("INFO", logger="ddp_crossover")
    Ranks([Speed(0.0, 0.01), Speed(0.0, 0.0101)]).train(2)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("ranks compute for 640 to 646 ms with 64, 64 samples of a batch, and other shares would not")
    assert "goes to communication" in said
