"""What the ledger adds up, and what of it belongs to one step."""

from __future__ import annotations

from ddp_crossover.addons.lease.sharing.lease_holder import Ledger


def test_a_turn_costs_only_the_time_that_it_waited_longer_than_it_held() -> None:
    ledger = Ledger()
    ledger.turn_ended(held_s=2.0, late_s=1.5)
    assert (ledger.held_s, ledger.slowed_s) == (2.0, 0.0)
    ledger.turn_ended(held_s=1.0, late_s=1.5)
    assert (ledger.held_s, ledger.slowed_s) == (3.0, 0.5)


def test_a_step_gets_what_was_added_since_the_step_before_it() -> None:
    ledger = Ledger()
    ledger.gap_ended(given_s=9.0, filled_s=9.0)
    assert ledger.step_ended(10.0) is None  # the first step began before anything was noted
    ledger.gap_ended(given_s=2.0, filled_s=0.5)
    ledger.turn_ended(held_s=1.0, late_s=1.25)
    assert ledger.step_ended(13.0) == (3.0, 0.5, 0.25, True)
    assert ledger.step_ended(14.0) == (1.0, 0.0, 0.0, False)
    assert (ledger.gaps, ledger.given_s, ledger.filled_s) == (2, 11.0, 9.5)
