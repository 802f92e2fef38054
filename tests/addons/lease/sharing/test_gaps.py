"""Which waits are given away, and when sharing is given up: decisions from times, without any lease."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover.addons.lease.sharing.gap_policy import MIN_GAIN, ExpectedWaits, Gain, StepFigures

HAND_OFF_S = 2e-4

pytestmark = pytest.mark.quick


def waits(**known: list[float]) -> ExpectedWaits:
    expected = ExpectedWaits()
    for _ in range(3):
        expected.note_acquire(0.75 * HAND_OFF_S)
        expected.note_release(0.25 * HAND_OFF_S)
    for key, seconds in known.items():
        for waited_s in seconds:
            expected.note(key, waited_s)
    return expected


def test_a_hand_off_costs_what_it_costs_at_best() -> None:
    expected = waits()
    for _ in range(6):
        expected.note_acquire(1.0)  # another job was faster
    assert expected.hand_off_s == HAND_OFF_S
    for _ in range(6):
        expected.note_acquire(1.0)
    assert expected.hand_off_s == 1e-3


def test_a_wait_is_given_at_once_only_where_it_has_been_long_before() -> None:
    expected = waits(long=[0.1, 0.1, 0.0], short=[1e-4, 1e-4, 0.5])
    assert expected.is_worth_giving("long", 0.0)
    assert not expected.is_worth_giving("short", 0.0)
    assert not expected.is_worth_giving("never seen", 0.0)


def test_the_rest_of_a_wait_is_not_given() -> None:
    expected = waits(long=[0.1])
    assert expected.is_worth_giving("long", 0.05)
    assert not expected.is_worth_giving("long", 0.1 - HAND_OFF_S)


def test_old_waits_are_forgotten() -> None:
    expected = waits(changing=[0.1] * 50 + [0.0] * 5)
    assert not expected.is_worth_giving("changing", 0.0)


def test_a_wait_that_is_not_seen_is_tried_now_and_then() -> None:
    expected = waits(long=[0.1], short=[0.0])
    assert expected.is_worth_trying("never seen")
    assert expected.is_worth_trying("long")
    assert [expected.is_worth_trying("short") for _ in range(100)].count(True) == 2


@given(st.lists(st.floats(0, 10), max_size=8), st.floats(1e-6, 1e-3))
def test_no_wait_is_kept_for_ever(known: list[float], hand_off_s: float) -> None:
    """Else two jobs on two devices could each hold what the other's ranks need."""
    expected = waits(key=known)
    for _ in range(20):
        expected.note_acquire(hand_off_s)
    assert expected.is_worth_giving("key", max(known, default=0.0) + 0.1)


def run(gain: Gain, steps: int, filled_s: float, slowed_s: float = 0.0, *, contended: bool = True) -> None:
    for _ in range(steps):
        gain.step(StepFigures(1.0, filled_s, slowed_s, was_disturbed=contended))


def test_below_the_least_gain_sharing_ends() -> None:
    for filled_s, slowed_s, pays in ((0.021, 0.0, True), (0.019, 0.0, False), (0.5, 0.49, False), (0.5, 0.4, True)):
        gain = Gain()
        run(gain, 10, filled_s, slowed_s)
        assert gain.sharing == pays
        assert abs(gain.last - (filled_s - slowed_s)) < 1e-9
    assert MIN_GAIN == 0.02


def test_nothing_is_decided_from_a_few_steps_or_without_another_job() -> None:
    gain = Gain()
    run(gain, 9, 0.0)
    run(gain, 1000, 0.0, contended=False)
    assert gain.sharing and gain.last is None
    run(gain, 1, 0.0)
    assert not gain.sharing


def test_a_job_that_is_kept_waiting_does_not_wait_for_the_end_of_the_window() -> None:
    gain = Gain()
    run(gain, 1, 0.0, slowed_s=10.0)
    assert not gain.sharing


def test_it_is_tried_again_after_a_break_that_doubles() -> None:
    def steps_of_break() -> int:
        run(gain, 10, 0.0)
        steps = 0
        while not gain.sharing:
            run(gain, 1, 0.0, contended=False)
            steps += 1
        return steps

    gain = Gain()
    assert [steps_of_break() for _ in range(6)] == [250, 500, 1000, 2000, 4000, 4000]
    run(gain, 10, 0.5)
    assert steps_of_break() == 250
