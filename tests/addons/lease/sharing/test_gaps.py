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


@given(st.lists(st.floats(0, 10), max_size=8), st.floats(1e-6, 1e-3))
def test_no_wait_is_kept_for_ever(known: list[float], hand_off_s: float) -> None:
    """Else two jobs on two devices could each hold what the other's ranks need."""
    expected = waits(key=known)
    for _ in range(20):
        expected.note_acquire(hand_off_s)
    assert expected.is_worth_giving("key", max(known, default=0.0) + 0.1)


def run(gain: Gain, shared_s: float, plain_s: float, steps: int, *, disturbed: bool = True) -> list[bool]:
    """Steps of one length with the lease and of another one without it; whether each had the lease."""
    had = []
    for _ in range(steps):
        had.append(gain.sharing)
        gain.step(StepFigures(shared_s if gain.sharing else plain_s, 0.0, was_disturbed=disturbed))
    return had


COMPARED_STEPS = 40


@pytest.mark.parametrize(("shared_s", "pays"), [(0.97, True), (0.99, False), (1.0, False), (1.3, False), (0.5, True)])
def test_it_takes_a_break_unless_steps_are_shorter_with_the_lease(shared_s: float, pays: bool) -> None:
    gain = Gain()
    had = run(gain, shared_s, 1.0, COMPARED_STEPS)
    assert had == [True] * 20 + [False] * 20
    assert gain.sharing == pays and gain.takes_break == (not pays)
    assert gain.last == pytest.approx(1 - shared_s)
    assert MIN_GAIN == 0.02


def test_nothing_is_compared_without_another_job() -> None:
    gain = Gain()
    assert all(run(gain, 1.0, 1.0, 19))
    assert all(run(gain, 1.0, 1.0, 1000, disturbed=False))
    assert gain.last is None
    run(gain, 1.0, 1.0, 1)
    assert not gain.sharing and not gain.takes_break


def test_the_first_steps_of_a_window_do_not_count_because_the_host_runs_ahead() -> None:
    gain = Gain()
    run(gain, 1.0, 1.0, 20)
    run(gain, 1.0, 0.1, 10)
    run(gain, 1.0, 1.5, 10)
    assert gain.sharing and gain.last == pytest.approx(1 / 3)


def test_a_job_that_is_kept_waiting_does_not_wait_for_the_end_of_the_window() -> None:
    gain = Gain()
    run(gain, 0.1, 0.1, 1)
    gain.step(StepFigures(10.0, 9.9, was_disturbed=True))
    assert not gain.sharing


def test_a_pause_of_the_script_is_no_wait_for_the_lease() -> None:
    gain = Gain()
    run(gain, 0.3, 0.4, 1)
    run(gain, 12.0, 0.4, 1)
    assert all(run(gain, 0.3, 0.4, 18))
    run(gain, 0.3, 0.4, 20)
    assert gain.sharing and gain.last == pytest.approx(0.25)


def test_it_is_compared_again_after_a_thousand_steps_or_when_it_becomes_slower() -> None:
    gain = Gain()
    run(gain, 0.5, 1.0, COMPARED_STEPS)
    assert run(gain, 0.5, 1.0, 1001).index(False) == 1000
    gain = Gain()
    run(gain, 0.5, 1.0, COMPARED_STEPS)
    assert run(gain, 1.1, 1.0, COMPARED_STEPS) == [True] * 20 + [False] * 20
    assert gain.takes_break


def test_it_is_tried_again_after_a_break_that_doubles() -> None:
    def steps_of_break() -> int:
        run(gain, 1.0, 1.0, COMPARED_STEPS)
        steps = 0
        while gain.takes_break:
            run(gain, 1.0, 1.0, 1, disturbed=False)
            steps += 1
        return steps

    gain = Gain()
    assert [steps_of_break() for _ in range(6)] == [250, 500, 1000, 2000, 4000, 4000]
    run(gain, 0.5, 1.0, COMPARED_STEPS)
    run(gain, 1.01, 1.0, 20)
    assert steps_of_break() == 230  # of 250: its first 20 were those in which it was compared again
