"""For which job a free GPU is reserved after a tie, and what that may cost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_crossover.addons.lease.broker.arbiter import Arbiter
from ddp_crossover.addons.lease.broker.jobs import JobKey
from ddp_crossover.addons.lease.broker.ties import BUDGET_RATE, BUDGET_S, LONGEST_S, TIE
from ddp_crossover.addons.lease.protocol import Role

GPU = "GPU-0"
HOLD_S = 0.1
LATE_S = 0.5 * TIE * HOLD_S
MEMBERS = {"a": 1, "b": 2, "c": 3}


class OneGpu:
    """An arbiter, and jobs that ask and release by name."""

    def __init__(self, jobs: str = "ab") -> None:
        self.arbiter = Arbiter(first_fence=1)
        self.requests = dict.fromkeys(jobs, 0)
        self.now_s = 10.0
        for job in jobs:
            self.arbiter.join(MEMBERS[job], JobKey(0, job), GPU, Role.PEER, 1.0)

    @property
    def holder(self) -> str | None:
        key = self.arbiter.holding_job(GPU)
        return key.name if key is not None else None

    def ask(self, job: str) -> None:
        self.requests[job] += 1
        self.arbiter.request(MEMBERS[job], self.requests[job], self.now_s)

    def release(self, after_s: float = 0.0) -> None:
        assert self.holder is not None
        self.now_s += after_s
        self.arbiter.release(MEMBERS[self.holder], self.arbiter.view(GPU).fence, 0, self.now_s)

    def tie(self, first: str, second: str, late_s: float = LATE_S) -> None:
        """``first`` finds the GPU free, ``second`` comes a little later, both have their turn and are away."""
        self.ask(first)
        self.now_s += late_s
        self.ask(second)
        self.release(HOLD_S - late_s)
        assert self.holder == second
        self.release(HOLD_S)
        self.now_s += HOLD_S


def test_after_a_tie_the_gpu_is_reserved_for_the_job_whose_name_sorts_first() -> None:
    gpu = OneGpu()
    gpu.tie("b", "a")
    gpu.ask("b")
    assert gpu.holder is None
    assert gpu.arbiter.view(GPU).waiters == 1
    gpu.now_s += LATE_S
    gpu.ask("a")
    assert gpu.holder == "a"
    gpu.release(HOLD_S)
    assert gpu.holder == "b"


@pytest.mark.parametrize(
    ("first", "second", "late_s"),
    [("a", "b", LATE_S), ("b", "a", 1.1 * TIE * HOLD_S)],
    ids=["the right order", "not together"],
)
def test_nothing_is_reserved_where_jobs_come_in_the_right_order_or_not_together(first, second, late_s) -> None:
    gpu = OneGpu()
    gpu.tie(first, second, late_s)
    gpu.ask(first)
    assert gpu.holder == first


def test_a_reservation_lasts_no_longer_than_a_tie_and_is_made_once() -> None:
    gpu = OneGpu()
    gpu.tie("b", "a")
    gpu.ask("b")
    [until_s] = gpu.arbiter.reserved().values()
    assert until_s == pytest.approx(gpu.now_s + TIE * HOLD_S)
    gpu.now_s = until_s
    gpu.arbiter.end_reservation(GPU, gpu.now_s)
    assert gpu.holder == "b"
    assert not gpu.arbiter.reserved()
    gpu.release(HOLD_S)
    gpu.ask("b")
    assert gpu.holder == "b"


def test_a_tie_is_forgotten_once_the_jobs_come_apart() -> None:
    gpu = OneGpu()
    gpu.tie("b", "a")
    gpu.ask("a")
    gpu.ask("b")
    gpu.release(HOLD_S)
    gpu.release(HOLD_S)
    gpu.ask("b")
    assert gpu.holder == "b"


@pytest.mark.parametrize("leaves", ["before", "while the other waits"])
def test_nothing_is_reserved_for_a_job_that_has_left(leaves: str) -> None:
    gpu = OneGpu()
    gpu.tie("b", "a")
    if leaves == "before":
        gpu.arbiter.leave(MEMBERS["a"], gpu.now_s)
    gpu.ask("b")
    if leaves != "before":
        assert gpu.holder is None
        gpu.arbiter.leave(MEMBERS["a"], gpu.now_s)
    assert gpu.holder == "b"


def test_a_job_that_cancels_while_it_waits_for_a_reservation_is_forgotten() -> None:
    gpu = OneGpu()
    gpu.tie("b", "a")
    gpu.ask("b")
    gpu.arbiter.cancel(MEMBERS["b"], gpu.requests["b"], gpu.now_s)
    assert not gpu.arbiter.reserved()
    assert gpu.arbiter.view(GPU).waiters == 0
    gpu.ask("b")
    assert gpu.holder == "b"


def test_a_third_job_is_not_kept_waiting_for_an_absent_one() -> None:
    gpu = OneGpu("abc")
    gpu.tie("b", "a")
    gpu.ask("b")
    assert gpu.holder is None
    gpu.ask("c")
    assert gpu.holder == "b"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.floats(0.001, 0.3), min_size=3, max_size=3), st.floats(0.0, 0.5))
def test_a_gpu_is_reserved_for_a_bounded_part_of_the_time(seed: int, away_s: list[float], noise: float) -> None:
    """Jobs that hold and are away for similar times, which ties a lot of them."""
    rng = random.Random(seed)
    gpu = OneGpu("abc")
    start_s = gpu.now_s
    comes_s = {job: start_s + rng.uniform(0, 0.01) for job in "abc"}
    ends_s = kept_s = 0.0
    led = {"a": True, "b": True, "c": True}  # whether it has had a turn since it last stood back
    while gpu.now_s < start_s + 20.0:
        kept = gpu.arbiter.reserved()
        due = [*comes_s.values(), *kept.values(), *([ends_s] if gpu.holder else [])]
        before_s, gpu.now_s = gpu.now_s, min(due)
        kept_s += (gpu.now_s - before_s) * bool(kept)
        assert kept_s <= BUDGET_S + BUDGET_RATE * (gpu.now_s - start_s) + 1e-9
        holder = gpu.holder
        if holder and ends_s <= gpu.now_s:
            gpu.release()
            comes_s[holder] = gpu.now_s + away_s["abc".index(holder)] * (1 + rng.uniform(0, noise))
        for resource, until_s in kept.items():
            if until_s <= gpu.now_s:
                gpu.arbiter.end_reservation(resource, gpu.now_s)
        for job in [job for job, at_s in comes_s.items() if at_s <= gpu.now_s]:
            del comes_s[job]
            gpu.ask(job)
            if gpu.arbiter.reserved() and not kept:
                assert led[job], "the job waits for a second reservation without a turn in between"
                led[job] = False
                assert max(gpu.arbiter.reserved().values()) <= gpu.now_s + LONGEST_S
        if gpu.holder not in (None, holder):
            led[gpu.holder] = True
            ends_s = gpu.now_s + rng.choice([0.02, 0.1, 0.3])
