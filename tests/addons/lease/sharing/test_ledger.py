"""What the ledger adds up, and what of it belongs to one step."""

from __future__ import annotations

from ddp_crossover.addons.lease.sharing.lease_holder import Ledger


def test_a_step_is_disturbed_if_another_job_was_there_since_the_step_before_it() -> None:
    ledger = Ledger()
    ledger.gap_ended(given_s=9.0, filled_s=9.0)
    assert ledger.step_ended(10.0) is None  # the first step began before anything was noted
    ledger.gap_ended(given_s=2.0, filled_s=0.5)
    ledger.turn_ended(held_s=1.0)
    ledger.wait_for_grant(0.5)
    assert ledger.step_ended(13.0) == (3.0, 0.5, True)
    assert ledger.step_ended(14.0) == (1.0, 0.0, False)
    assert (ledger.gaps, ledger.given_s, ledger.filled_s, ledger.held_s) == (2, 11.0, 9.5, 1.0)
