"""Which of several jobs gets the resource, and when: the pure core of the lease.

That each hold has one job and one fence, that no waiter is lost and that what is stale is ignored, whatever members do,
is in test_lease_arbiter_states.py.
"""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_crossover.addons.lease.broker.arbiter import Arbiter, Grant, MismatchError
from ddp_crossover.addons.lease.broker.fairness import AHEAD_S, EQUAL_S
from ddp_crossover.addons.lease.broker.holds import Limits
from ddp_crossover.addons.lease.broker.jobs import JobKey
from ddp_crossover.addons.lease.protocol import Role

GPU = "GPU-0"
TOGETHER_S = EQUAL_S / 2
APART_S = 2 * EQUAL_S


def job(name: str) -> JobKey:
    return JobKey(1000, name)


def arbiter_with(*names: str) -> Arbiter:
    """Member 1 of the first job, member 2 of the second, ..."""
    arbiter = Arbiter(first_fence=100)
    for member, name in enumerate(names, 1):
        arbiter.join(member, job(name), GPU, Role.PEER, 1.0)
    return arbiter


def test_first_come_first_served_among_equals() -> None:
    arbiter = arbiter_with("holder", "z", "y", "x")
    arbiter.request(1, 1, 0.0)
    for order, member in enumerate((2, 3, 4)):
        arbiter.request(member, 1, order * APART_S)
    fences = []
    holder = 1
    for _ in range(3):
        # Each holds for no time, so that all stay equal.
        [grant] = arbiter.release(holder, arbiter.view(GPU).fence, 0, 0.1)
        holder = grant.member
        fences.append(holder)
    assert fences == [2, 3, 4]


@pytest.mark.parametrize("arrivals", [(2, 3), (3, 2)])
def test_those_that_came_together_go_by_name_whatever_the_order(arrivals: tuple[int, int]) -> None:
    arbiter = arbiter_with("holder", "a", "b")
    arbiter.request(1, 1, 0.0)
    arbiter.request(arrivals[0], 1, 0.1)
    arbiter.request(arrivals[1], 1, 0.1 + TOGETHER_S)
    assert arbiter.release(1, 100, 0, 0.2)[0].member == 2


def test_who_yields_comes_after_those_that_waited_whatever_their_names() -> None:
    arbiter = arbiter_with("a", "b")
    arbiter.request(1, 1, 0.0)
    arbiter.request(2, 1, 0.1)
    assert arbiter.release(1, 100, 2, 0.1 + TOGETHER_S)[0].member == 2


def test_a_job_that_was_away_starts_level_and_not_with_credit() -> None:
    arbiter = arbiter_with("a", "b")
    arbiter.request(1, 1, 0.0)
    arbiter.request(2, 1, 1000.0)  # a has held for 1000 s that nobody wanted
    arbiter.release(1, 100, 2, 1000.1)
    arbiter.release(2, 101, 2, 1000.3)
    assert arbiter.holders(GPU) == {1}


def test_a_filler_gets_only_what_no_peer_wants_and_is_asked_to_yield() -> None:
    arbiter = arbiter_with("a", "b")
    arbiter.join(3, job("filler"), GPU, Role.FILLER, 1.0)
    arbiter.request(1, 1, 0.0)
    arbiter.request(3, 1, 0.1)
    arbiter.request(2, 1, 0.2)
    assert arbiter.release(1, 100, 0, 5.0)[0].member == 2  # though the filler came first
    assert arbiter.release(2, arbiter.view(GPU).fence, 0, 5.1)[0].member == 3
    fence = arbiter.view(GPU).fence
    assert arbiter.view(GPU)[:4] == (fence, 0, 0, 0)
    arbiter.request(1, 2, 5.2)
    assert arbiter.view(GPU)[:4] == (fence, fence, 1, 1)
    assert arbiter.overdue(5.2 + Limits().filler_s) == [GPU]


def test_a_hold_has_a_limit_only_while_somebody_waits() -> None:
    arbiter = arbiter_with("a", "b")
    arbiter.request(1, 1, 0.0)
    assert arbiter.overdue(1e9) == []
    arbiter.request(2, 1, 1e9)
    assert arbiter.overdue(1e9) == []
    assert arbiter.overdue(1e9 + Limits().hold_s) == [GPU]
    assert arbiter.evict(GPU, 1e9 + 10) == [Grant(2, 1, 101)]
    assert arbiter.release(1, 100, 0, 1e9 + 11) == []
    assert arbiter.holders(GPU) == {2}


def test_a_filler_that_waits_does_not_press_a_peer() -> None:
    arbiter = arbiter_with("a", "a")
    arbiter.join(3, job("filler"), GPU, Role.FILLER, 1.0)
    arbiter.request(1, 1, 0.0)
    arbiter.request(3, 1, 0.1)
    assert arbiter.view(GPU)[:4] == (100, 0, 1, 0)
    assert arbiter.overdue(1e9) == []
    # Nor does it keep ranks of the peer from taking turns.
    arbiter.request(2, 1, 0.2)
    arbiter.release(1, 100, 0, 0.3)
    assert arbiter.request(1, 2, 0.4) == [Grant(1, 2, 100)]


def test_members_that_take_turns_cannot_keep_others_out() -> None:
    arbiter = arbiter_with("a", "a", "b")
    arbiter.request(1, 1, 0.0)
    arbiter.request(2, 1, 0.1)
    arbiter.request(3, 1, 0.2)
    arbiter.release(1, 100, 0, 0.3)
    assert arbiter.request(1, 2, 0.4) == []  # once per fence while b waits
    assert {grant.member for grant in arbiter.release(2, 100, 0, 0.5)} == {3}


def test_a_latecomer_joins_its_job_even_while_others_wait() -> None:
    arbiter = arbiter_with("a", "a", "b")
    arbiter.request(1, 1, 0.0)
    arbiter.request(3, 1, 0.1)
    assert arbiter.request(2, 1, 0.2) == [Grant(2, 1, 100)]


def test_members_of_a_job_agree_on_weight_and_role() -> None:
    for role, weight in ((Role.PEER, 2.0), (Role.FILLER, 1.0)):
        with pytest.raises(MismatchError):
            arbiter_with("a").join(2, job("a"), GPU, role, weight)


def test_a_job_on_two_resources_is_ordered_alike_on_both() -> None:
    """What was held on one resource counts on the other, so that two jobs take turns in the same order on both."""
    arbiter = Arbiter(first_fence=1)
    members = {}
    for member, (name, gpu) in enumerate(((n, g) for n in "abc" for g in ("GPU-0", "GPU-1")), 1):
        arbiter.join(member, job(name), gpu, Role.PEER, 1.0)
        members[name, gpu] = member
    # a holds GPU-0 for long, b GPU-1 for short, while the others wait everywhere; then c has its turn on both.
    for name, gpu in (("a", "GPU-0"), ("b", "GPU-1")):
        arbiter.request(members[name, gpu], 1, 0.0)
    for gpu in ("GPU-0", "GPU-1"):
        arbiter.request(members["c", gpu], 1, 0.01)
    arbiter.request(members["a", "GPU-1"], 1, 0.02)
    arbiter.request(members["b", "GPU-0"], 1, 0.02)
    arbiter.release(members["b", "GPU-1"], arbiter.view("GPU-1").fence, 2, 0.1)
    arbiter.release(members["a", "GPU-0"], arbiter.view("GPU-0").fence, 2, 1.0)
    orders = []
    for gpu in ("GPU-0", "GPU-1"):
        order = []
        while (holder := arbiter.holding_job(gpu)) is not None:
            order.append(holder.name)
            arbiter.release(members[holder.name, gpu], arbiter.view(gpu).fence, 0, 2.0)
        orders.append(order)
    assert orders[0] == orders[1] == ["c", "b", "a"]


# ---- fairness of jobs that always want more


def held_times(weights: list[float], hold_s: list[float], turns: int, seed: int = 0) -> list[float]:
    """Time that each of ``len(weights)`` jobs holds. Holds last 50% to 100% of ``hold_s``; each job asks again as it
    releases.
    """
    rng = random.Random(seed)
    arbiter = Arbiter(first_fence=1)
    held_s = [0.0] * len(weights)
    for index, weight in enumerate(weights):
        arbiter.join(index, job(str(index)), GPU, Role.PEER, weight)
    holder = arbiter.request(0, 1, 0.0)[0]
    for index in range(1, len(weights)):
        arbiter.request(index, 1, 0.0)
    now_s = 0.0
    for turn in range(turns):
        took_s = hold_s[holder.member] * rng.uniform(0.5, 1.0)
        now_s += took_s
        held_s[holder.member] += took_s
        [holder] = arbiter.release(holder.member, holder.fence, turn + 2, now_s)
    return held_s


@pytest.mark.parametrize("other", ["is absent", "has left", "is there"])
def test_a_job_on_two_resources_gets_as_much_of_each_as_its_rivals_there(other: str) -> None:
    arbiter = Arbiter(first_fence=1)
    members = [(1, "wide", "GPU-0"), (2, "wide", "GPU-1"), (3, "narrow", "GPU-0"), (4, "other", "GPU-1")]
    held_s = {}
    for member, name, gpu in members[: 3 if other == "is absent" else 4]:
        arbiter.join(member, job(name), gpu, Role.PEER, 1.0)
        held_s[member] = 0.0
    if other == "has left":
        arbiter.leave(4, 0.0)
        del held_s[4]
    for member in held_s:
        arbiter.request(member, 1, 0.0)
    for turn in range(1, 1001):
        for gpu in ("GPU-0", "GPU-1"):
            [member] = arbiter.holders(gpu)
            held_s[member] += 0.01
            arbiter.release(member, arbiter.view(gpu).fence, turn + 1, 0.01 * turn)
    assert held_s[1] == pytest.approx(held_s[3], rel=0.1)
    assert held_s[2] == pytest.approx(5.0 if other == "is there" else 10.0, rel=0.05)


def test_who_fills_gaps_has_had_its_turn_when_the_other_comes_back() -> None:
    """A job holds for 100 ms and is away for 100 ms, another one takes what it can get, 5 ms at a time."""
    arbiter = arbiter_with("with_gaps", "always")
    now_s, requests = 0.0, 0
    kept_waiting_s = 0.0

    def ask(member: int, fence: int = 0) -> list[Grant]:
        nonlocal requests
        requests += 1
        return arbiter.release(member, fence, requests, now_s) if fence else arbiter.request(member, requests, now_s)

    [held] = ask(2)
    for _ in range(100):
        now_s += 0.1  # the gap: nobody asks the other one to yield
        came_s = now_s
        assert ask(1) == []
        while held.member == 2:
            now_s += 0.005
            [held] = ask(2, held.fence)
        kept_waiting_s += now_s - came_s
        now_s += 0.1
        [held] = arbiter.release(1, held.fence, 0, now_s)
    assert kept_waiting_s / 100 == pytest.approx(0.005)


def test_time_goes_by_weight_although_jobs_leave_for_a_moment_after_each_step() -> None:
    """As instrumented models do: turns of 5 ms, and every 20 turns a step ends."""
    weights, steps, held_s = {1: 1.0, 2: 4.0}, {1: 0, 2: 0}, {1: 0.0, 2: 0.0}
    arbiter = Arbiter(first_fence=1)
    for member, weight in weights.items():
        arbiter.join(member, job(str(member)), GPU, Role.PEER, weight)
    now_s = 0.0
    [held] = arbiter.request(1, 1, now_s)
    arbiter.request(2, 1, now_s)
    for turn in range(2, 4002):
        now_s += 0.005
        member = held.member
        held_s[member] += 0.005
        steps[member] += 1
        if steps[member] % 20:
            [held] = arbiter.release(member, held.fence, turn, now_s)
        else:
            [held] = arbiter.release(member, held.fence, 0, now_s)
            now_s += 0.0002
            arbiter.request(member, turn, now_s)
    assert held_s[2] / sum(held_s.values()) == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_long_hold_that_nobody_wanted_sets_nobody_back(comes: str) -> None:
    """One job trains for an hour without a gap, then writes a checkpoint. Then two want the GPU all the time."""
    arbiter = arbiter_with("early", "late") if comes == "before" else arbiter_with("early")
    arbiter.request(1, 1, 0.0)
    if comes == "after":
        arbiter.join(2, job("late"), GPU, Role.PEER, 1.0)
    arbiter.release(1, 100, 0, 3600.0)
    now_s = 3601.0
    [held] = arbiter.request(2, 1, now_s)
    arbiter.request(1, 2, now_s)
    held_s = {1: 0.0, 2: 0.0}
    for turn in range(3, 1003):
        now_s += 0.01
        held_s[held.member] += 0.01
        [held] = arbiter.release(held.member, held.fence, turn, now_s)
    assert held_s[1] == pytest.approx(held_s[2], rel=0.05)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.001, 0.1)), min_size=2, max_size=6),
    st.integers(1, 400),
    st.integers(0, 1000),
)
def test_no_job_is_ever_further_behind_than_one_hold_of_each(
    jobs: list[tuple[float, float]], turns: int, seed: int
) -> None:
    """The bound of start-time fair queuing (Goyal et al. 1996, theorem 1), widened by how far one may get ahead."""
    weights, hold_s = [weight for weight, _ in jobs], [hold for _, hold in jobs]
    held_s = held_times(weights, hold_s, turns, seed)
    for i, j in combinations(range(len(jobs)), 2):
        apart_s = abs(held_s[i] / weights[i] - held_s[j] / weights[j])
        assert apart_s <= hold_s[i] / weights[i] + hold_s[j] / weights[j] + AHEAD_S + 2 * EQUAL_S
