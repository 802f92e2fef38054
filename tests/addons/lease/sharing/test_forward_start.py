"""When a forward should begin, so that all its waits are one wait before it: arithmetic, without any lease."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover.addons.lease.sharing.forward_start import MARGIN_S, ForwardStarts, Use, start_s

pytestmark = pytest.mark.quick

# Arrival of a leg, and compute between the wait before and this one.
forwards = st.lists(st.tuples(st.floats(-0.05, 0.2), st.floats(0, 0.02)), min_size=1, max_size=12)


def as_uses(forward: list[tuple[float, float]]) -> list[Use]:
    computed_s, uses = 0.0, []
    for arrival_s, more_s in forward:
        computed_s += more_s
        uses.append(Use(arrival_s, computed_s))
    return uses


def run(forward: list[tuple[float, float]], begin_s: float) -> tuple[float, float]:
    """When a forward ends that begins then and waits where it must, and for how long it stalls."""
    now_s, stalled_s = begin_s, 0.0
    for arrival_s, more_s in forward:
        now_s += more_s
        stalled_s += max(0.0, arrival_s - now_s)
        now_s = max(now_s, arrival_s)
    return now_s, stalled_s


@given(forwards)
def test_a_held_forward_does_not_stall_and_ends_as_early_as_one_that_is_not_held(forward) -> None:
    begin_s = start_s(as_uses(forward))
    held_end_s, stalled_s = run(forward, begin_s)
    assert stalled_s == pytest.approx(0.0, abs=1e-9)
    assert held_end_s == pytest.approx(run(forward, 0.0)[0])


@given(forwards, st.floats(0, 1))
def test_one_that_begins_too_early_stalls_for_just_the_difference(forward, part: float) -> None:
    could_begin_s = start_s(as_uses(forward))
    assert run(forward, part * could_begin_s)[1] == pytest.approx((1 - part) * could_begin_s, abs=1e-9)


@given(forwards)
def test_it_is_never_held_beyond_the_last_arrival(forward) -> None:
    assert 0.0 <= start_s(as_uses(forward)) <= max(0.0, *(arrival_s for arrival_s, _ in forward), 0.0)


def test_without_waits_it_begins_at_once() -> None:
    assert start_s([]) == 0.0


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=30))
def test_the_next_one_is_predicted_from_the_latest_steps(starts_s: list[float]) -> None:
    starts = ForwardStarts()
    assert starts.predicted_s is None
    for one_s in starts_s:
        starts.note(one_s)
    expected_s = statistics.median(starts_s[-9:]) - MARGIN_S
    assert starts.predicted_s == pytest.approx(max(0.0, expected_s))


def test_a_change_is_followed_within_five_steps() -> None:
    starts = ForwardStarts()
    for one_s in [0.1] * 20 + [0.05] * 5:
        starts.note(one_s)
    assert starts.predicted_s == pytest.approx(0.05 - MARGIN_S)


def test_a_job_asks_as_early_as_a_filler_needs_and_never_cuts_a_turn_short() -> None:
    starts = ForwardStarts()
    assert starts.lead_s == 0.0
    for _ in range(9):
        starts.note_grant(3e-3)
    assert starts.lead_s == 3e-3
    for _ in range(5):
        starts.note_grant(0.03)
    assert starts.lead_s == 0.0
