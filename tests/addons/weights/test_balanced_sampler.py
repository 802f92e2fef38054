"""The batch sampler by itself: epochs, last batches, resuming, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover import BalancedSampler
from ddp_crossover.addons.weights.sampler import BatchNumber
from ddp_crossover.addons.weights.split import Speed
from heard import heard

SPEEDS = [Speed(0.0, 0.01), Speed(0.1, 0.02), Speed(0.0, 0.03)]


def _samplers(samples: int = 100, global_batch: int = 16, **options) -> list[BalancedSampler]:
    return [BalancedSampler(samples, global_batch, rank=rank, world_size=3, **options) for rank in range(3)]


def _epoch(samplers: list[BalancedSampler]) -> list[list[int]]:
    """The samples of each batch of all ranks."""
    return [list(itertools.chain(*batch)) for batch in zip(*map(list, samplers), strict=True)]


@pytest.mark.quick
@given(st.integers(3, 200), st.integers(3, 60), st.booleans(), st.booleans())
def test_every_sample_of_an_epoch_comes_once(samples, global_batch, drop_last, is_balanced) -> None:
    samplers = _samplers(samples, global_batch, drop_last=drop_last)
    if is_balanced:
        for one in samplers:
            one.use(SPEEDS, BatchNumber(0, 1))
    batches = _epoch(samplers)
    assert len(batches) == len(samplers[0])
    seen = sorted(itertools.chain(*batches))
    whole = samples - samples % global_batch if drop_last and samples >= global_batch else samples
    assert len(seen) == whole
    assert len(set(seen)) == whole
    for one in samplers:
        assert all(batch for batch in one), "no rank has an empty batch"


def test_epochs_differ_and_repeat() -> None:
    first, second = _epoch(samplers := _samplers()), _epoch(samplers)
    assert first != second
    again = _samplers()
    for one in again:
        one.set_epoch(1)
    assert _epoch(again) == second
    assert _epoch(_samplers(shuffle=False))[0] == list(range(16))
    assert _epoch(_samplers(seed=1)) != first


@pytest.mark.parametrize("done", [0, 3, 6])
@pytest.mark.parametrize("epoch", [0, 2])
def test_it_goes_on_in_the_middle_of_an_epoch(done, epoch) -> None:
    samplers = _samplers()
    for one in samplers:
        one.set_epoch(epoch)
        one.use(SPEEDS, BatchNumber(0, 0))
    whole = [list(one) for one in samplers]
    for one, batches in zip(samplers, whole, strict=True):
        one.set_epoch(epoch)
        iterator = iter(one)
        for _ in range(done):
            next(iterator)
        resumed = BalancedSampler(100, 16, rank=one.rank, world_size=3)
        if done:
            resumed.load_state_dict(one.state_dict())
        else:
            resumed.use(SPEEDS, BatchNumber(0, 0))
        resumed.set_epoch(epoch)
        assert len(resumed) == len(batches) - done
        assert list(resumed) == batches[done:]
        resumed.set_epoch(epoch + 1)
        assert len(list(resumed)) == len(batches)


def test_the_end_of_an_epoch_is_the_begin_of_the_next() -> None:
    [one, *_] = _samplers()
    list(one)
    assert (state := one.state_dict())["epoch"] == 1
    assert state["batch"] == 0


def test_batches_that_were_drawn_but_not_trained_on_come_again() -> None:
    [one, *_] = _samplers()
    batches = list(_samplers()[0])
    iterator = iter(one)
    drawn = [next(iterator) for _ in range(2)]
    one.follow_training(lambda place: None, lambda: None)
    drawn += [next(iterator) for _ in range(3)]
    one.count_trained(5)
    one.count_trained(5)
    resumed = BalancedSampler(100, 16, rank=0, world_size=3)
    resumed.load_state_dict(one.state_dict())
    assert list(resumed) == batches[4:]
    assert drawn == batches[:5]


def test_a_step_may_train_on_several_batches() -> None:
    [one, *_] = _samplers()
    one.follow_training(lambda place: None, lambda: None)
    sizes = [len(next(iterator)) for iterator in [iter(one)] for _ in range(6)]
    for samples, trained in ((sizes[0] + sizes[1], 2), (1000, 3), (sizes[3], 4)):  # 1000: tokens
        one.count_trained(samples)
        assert one.state_dict()["batch"] == trained
    one.follow_draws()
    assert one.state_dict()["batch"] == 6, "nobody follows training any more"


def test_speeds_of_another_number_of_ranks_are_dropped() -> None:
    [one, *_] = _samplers()
    one.use(SPEEDS, BatchNumber(0, 0))
    other = BalancedSampler(100, 16, rank=0, world_size=2)
    other.load_state_dict(one.state_dict())
    assert other.sizes() == [8, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 2}, "each of 3 ranks needs a sample"),
        ({"samples": 2}, "each of 3 ranks needs a sample"),
        ({"max_samples": 5}, r"up to 16 samples, and ranks take at most \[5, 5, 5\]"),
        ({"max_samples": [9, 9]}, "one number, or one for each of 3 ranks"),
        ({"max_samples": [20, 0, 20]}, r"at least 1, because each rank takes part, got \[20, 0, 20\]"),
        ({"max_samples": [20, 20, -4]}, "at least 1"),
        ({"max_samples": 0}, "at least 1"),
    ],
)
def test_what_is_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        _samplers(**options)


@pytest.mark.parametrize("options", [{"global_batch": 4.0}, {"samples": 50.0}, {"max_samples": [9, 9, 9.5]}])
def test_numbers_that_are_not_whole_are_refused(options) -> None:
    with pytest.raises(TypeError, match="is a whole number of samples, got"):
        _samplers(**options)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"seed": 1}, "seed=1, and the sampler seed=0"),
        ({"samples": 99}, "samples=99, and the sampler samples=100"),
        ({"global_batch": 17}, "global_batch=17, and the sampler global_batch=16"),
        ({"shuffle": False}, "shuffle=False, and the sampler shuffle=True"),
        ({"drop_last": True}, "drop_last=True, and the sampler drop_last=False"),
    ],
)
def test_a_state_of_another_order_is_refused(option, message) -> None:
    [one, *_] = _samplers()
    with pytest.raises(ValueError, match=message):
        one.load_state_dict(_samplers(**option)[0].state_dict())
    state = one.state_dict()
    del state["samples"], state["shuffle"], state["drop_last"]  # as written by an earlier version
    one.load_state_dict(state)


def _seen_with_a_change_of_ranks(samples: int, before: int, after: int, done: int) -> list[int]:
    def samplers(ranks: int) -> list[BalancedSampler]:
        return [BalancedSampler(samples, 16, rank=rank, world_size=ranks) for rank in range(ranks)]

    seen: list[int] = []
    old = samplers(before)
    for one in old:
        batches = iter(one)
        for _ in range(done):
            seen += next(batches)
    for one in samplers(after):
        one.load_state_dict(old[0].state_dict())
        seen += itertools.chain(*one)
    return sorted(seen)


@pytest.mark.parametrize("done", range(1, 6))
def test_an_epoch_that_other_ranks_have_begun_is_finished(done) -> None:
    for samples, before, after in itertools.product((96, 98, 99), (2, 3, 5), (2, 3, 5)):
        assert _seen_with_a_change_of_ranks(samples, before, after, done) == list(range(samples))


def test_a_rest_that_is_too_small_for_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 samples left of epoch 0.*at most 2 ranks.*epoch=1 and batch=0"):
        _seen_with_a_change_of_ranks(98, 2, 3, 6)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank=3 is none of 3"):
        BalancedSampler(100, 16, rank=3, world_size=3)


def _heard_of(sampler: BalancedSampler, draws: int) -> list[str]:
    with heard() as said:
        for _ in range(draws):
            list(sampler)
    return said


def test_equal_shares_that_nothing_balances_are_said_once_by_rank_0() -> None:
    alone, second, _ = _samplers()
    [said] = _heard_of(alone, 10)
    assert "call state.balance(sampler)" in said and "equal shares, without state.balance" in repr(alone)
    assert _heard_of(second, 10) == []
    followed = _samplers()[0]
    followed.follow_training(lambda place: None, lambda: None)
    assert _heard_of(followed, 10) == [] and repr(followed).endswith("rank 0 of 3; shares [6, 5, 5]")
    assert _heard_of(_samplers(samples=10, global_batch=3)[0], 1) == []
