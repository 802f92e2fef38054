"""What is kept of iterations for users: how many, how long they took, and which code needed values early."""

from __future__ import annotations

from ddp_crossover.comm.link import Link
from ddp_crossover.pending.early_reads import EarlyReads
from ddp_crossover.report.stats import FallbackLog, StepLog


class Iterations:
    """The record of one model.

    Args:
        link: has the times of legs and waits.
        early_reads: which code needs updates or gradients early.
        fallbacks: what took a slower path.

    Attributes:
        count, pipelined: how many have ended.
        steps: the figures of the latest ones.
    """

    def __init__(self, link: Link, early_reads: EarlyReads, fallbacks: FallbackLog) -> None:
        self._link = link
        self.early_reads = early_reads
        self.fallbacks = fallbacks
        self.count = self.pipelined = 0
        self.steps = StepLog()

    def reduced(self) -> None:
        """Count a backward whose gradients are reduced, or will be."""
        self.count += 1

    def ended(self, *, is_pipelined: bool) -> None:
        """Note the end of that backward, of which all have been told."""
        self.pipelined += is_pipelined
        self.steps.note(
            self._link.clock.sums(),
            self._link.sent_bytes,
            self.fallbacks.counts,
            is_pipelined=is_pipelined,
            was_looked_at=self.early_reads.is_explained,
        )
        self.early_reads.next_step()
