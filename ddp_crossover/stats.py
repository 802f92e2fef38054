"""What happened: figures for users, and the log of what had to fall back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger("ddp_crossover")


@dataclass(frozen=True)
class DearStats:
    """Figures of one rank since attach.

    Attributes:
        iterations: backward passes whose gradients were reduced.
        pipelined_iterations: those of them that took the pipeline; the others were plain all-reduces.
        deferred_steps: ``optimizer.step()`` calls with at least one update put off to the next forward.
        elapsed_s: wall-clock time since the first reduced backward ended.
        communication_s: time in which at least one leg was under way. 0 on NCCL, where it is not host time.
        exposed_s: time in which the training thread waited for a leg. 0 on NCCL.
        sent_bytes: payload bytes that this rank has sent.
        fallbacks: for each reason, how often something was done the slower way.
    """

    iterations: int
    pipelined_iterations: int
    deferred_steps: int
    elapsed_s: float
    communication_s: float
    exposed_s: float
    sent_bytes: int
    fallbacks: Mapping[str, int]

    @property
    def compute_s(self) -> float:
        """Time not spent waiting for communication."""
        return self.elapsed_s - self.exposed_s


class FallbackLog:
    """Counts fall-backs by reason, and logs each reason once."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, reason: str) -> None:
        if not self.counts[reason]:
            logger.warning("ddp_crossover: %s", reason)
        self.counts[reason] += 1
