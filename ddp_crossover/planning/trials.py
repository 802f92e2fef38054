"""What the tuner has measured, and what may be concluded from it: noise, drift of the machine, who is faster.

Pure: numbers in, numbers out, and no arithmetic but Python's own, so ranks that were fed the same times conclude the
same. Knows nothing of budgets or of what to try next.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import median

AUTO, ALLREDUCE = "auto", "allreduce"

# Faster by less than this is not faster: nobody would notice, and every change of plan is a risk.
MIN_GAIN = 0.01
# The standard deviation of normal noise from its median absolute deviation, and that of a median from that of its
# samples (the median's asymptotic variance is pi / 2 times the mean's). Samples are few, so both are rough.
STD_PER_MAD = 1.4826
STD_OF_MEDIAN = math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class Candidate:
    """One way to reduce gradients that can be tried.

    Attributes:
        fusion_mb: target size of a fusion group in MiB; means nothing to plain all-reduce.
        schedule: ``"auto"`` or ``"allreduce"``.
    """

    fusion_mb: float
    schedule: str = AUTO

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fusion_mb) and self.fusion_mb > 0):
            raise ValueError(f"fusion_mb={self.fusion_mb!r}: give a size in MiB greater than 0")
        if self.schedule not in (AUTO, ALLREDUCE):
            raise ValueError(f"schedule={self.schedule!r}: only {AUTO!r} and {ALLREDUCE!r} can be tuned")

    def __str__(self) -> str:
        return "plain all-reduce" if self.schedule == ALLREDUCE else f"{self.fusion_mb:.3g} MiB"


@dataclass(frozen=True)
class Trial:
    """Consecutive training steps under one candidate.

    Attributes:
        candidate: what they ran under.
        steps_s: how long each took, in seconds, warm-up left out. Never empty.
    """

    candidate: Candidate
    steps_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.steps_s)


class TrialLog:
    """All trials so far. Times of different trials are compared as if all had run on the machine as it is now.

    A shared machine or link gets slower and faster while it is being measured. Whatever was measured twice shows by how
    much, and all trials are corrected by a steady drift.

    Attributes:
        trials: in the order in which they ran.
    """

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def count(self, candidate: Candidate) -> int:
        """How often it was tried."""
        return sum(trial.candidate == candidate for trial in self.trials)

    def candidates(self, schedule: str) -> list[Candidate]:
        """Those tried, in the order of their first trial."""
        tried = dict.fromkeys(trial.candidate for trial in self.trials)
        return [candidate for candidate in tried if candidate.schedule == schedule]

    def time_s(self, candidate: Candidate) -> float:
        """Its median step time in seconds, as the machine is now."""
        drift, last = self._drift(), len(self.trials) - 1
        return median(
            step_s * math.exp(drift * (last - index))
            for index, trial in enumerate(self.trials)
            if trial.candidate == candidate
            for step_s in trial.steps_s
        )

    def faster(self, one: Candidate, other: Candidate) -> bool:
        """Whether ``one`` is faster than ``other`` by more than the noise, and by more than 1%."""
        margin = max(MIN_GAIN, math.hypot(self._noise(one), self._noise(other)))
        return math.log(self.time_s(other) / self.time_s(one)) > margin

    def fastest(self) -> Candidate:
        """The first ``"auto"`` candidate that no later one was faster than."""
        best, *others = self.candidates(AUTO)
        for other in others:
            if self.faster(other, best):
                best = other
        return best

    def winner(self) -> Candidate:
        """The fastest, or plain all-reduce unless the fastest beats it."""
        fastest = self.fastest()
        beaten = all(self.faster(fastest, plain) for plain in self.candidates(ALLREDUCE))
        return fastest if beaten else self.candidates(ALLREDUCE)[0]

    def _noise(self, candidate: Candidate) -> float:
        """Relative standard deviation of :meth:`time_s`, from the spread of all trials."""
        steps = sum(len(trial.steps_s) for trial in self.trials if trial.candidate == candidate)
        return self._step_noise() * STD_OF_MEDIAN / math.sqrt(steps)

    def _step_noise(self) -> float:
        """Relative standard deviation of one step within its trial."""
        deviations = [abs(step_s / trial.median_s - 1) for trial in self.trials for step_s in trial.steps_s]
        return STD_PER_MAD * median(deviations)

    def _drift(self) -> float:
        """By how much the machine gets slower from one trial to the next, as a natural logarithm; 0 if not known.

        A straight line through what the trials of one candidate, from the earlier to the later, have become slower by.
        """
        pairs = itertools.combinations(enumerate(self.trials), 2)
        alike = [(j - i, early, late) for (i, early), (j, late) in pairs if early.candidate == late.candidate]
        slower = sum(math.log(late.median_s / early.median_s) for _, early, late in alike)
        return slower / sum(apart for apart, _, _ in alike) if alike else 0.0
