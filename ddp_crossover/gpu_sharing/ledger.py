"""Figures of how one job has shared its device. Only adds up: no clock, no lease, no decisions."""

from __future__ import annotations

from typing import NamedTuple


class StepFigures(NamedTuple):
    """What one step has added to a :class:`Ledger`.

    Attributes:
        elapsed_s: duration of the step.
        filled_s: time inside gaps in which another job held the lease.
        slowed_s: time by which sharing has slowed this job down.
        was_disturbed: whether another job has wanted or held the device.
    """

    elapsed_s: float
    filled_s: float
    slowed_s: float
    was_disturbed: bool


class Ledger:
    """Sums since attach; what the attributes mean stands at :class:`ddp_crossover.figures.stats.LeaseUse`.

    Attributes:
        disturbances: how often another job has wanted or held the device so far.
    """

    def __init__(self) -> None:
        self.held_s = self.given_s = self.filled_s = self.regrant_s = self.slowed_s = 0.0
        self.gaps = self.hand_offs = self.disturbances = 0
        # When the last step ended, and filled_s, slowed_s and disturbances at that time.
        self._last_step: tuple[float, float, float, int] | None = None

    def hand_over(self) -> None:
        """Note that the lease was given up while another job waited for it."""
        self.hand_offs += 1
        self.disturb()

    def disturb(self) -> None:
        """Note that another job has wanted or held the device."""
        self.disturbances += 1

    def wait_for_grant(self, waited_s: float) -> None:
        """Note for how long compute has waited for the lease."""
        self.regrant_s += waited_s

    def slow_down(self, late_s: float) -> None:
        """Note by how much sharing has slowed this job down."""
        self.slowed_s += late_s

    def turn_ended(self, held_s: float, late_s: float) -> None:
        """Note a turn that was held for ``held_s``, after a wait of ``late_s`` for another job.

        A turn that waits no longer than it holds would have ended as late on a device that is shared in slices.
        """
        self.held_s += held_s
        self.slow_down(max(0.0, late_s - held_s))

    def gap_ended(self, given_s: float, filled_s: float) -> None:
        """Note a gap: for how long the lease was free, and for how long another job has held it meanwhile."""
        self.gaps += 1
        self.given_s += given_s
        self.filled_s += filled_s
        self.disturb()

    def step_ended(self, now_s: float) -> StepFigures | None:
        """Return the figures since the last step ended; None for the first step."""
        before, self._last_step = self._last_step, (now_s, self.filled_s, self.slowed_s, self.disturbances)
        if before is None:
            return None
        since_s, filled_s, slowed_s, disturbances = before
        return StepFigures(
            now_s - since_s, self.filled_s - filled_s, self.slowed_s - slowed_s, self.disturbances > disturbances
        )
