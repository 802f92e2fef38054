"""The tuner's measurements and their statistics: noise, drift of the machine, which candidate is faster.

Pure: uses only Python's own arithmetic, so ranks that are given the same times draw the same conclusions. It does not
know the tuner's budget or its next candidate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ddp_crossover.fusion import Schedule

# A candidate that is faster by less than this does not count as faster: not worth the risk of a change of plan.
MIN_GAIN = 0.01
# How much slower a candidate may be and still win, if it takes at least that part less of the processors' time, which
# other work on the host can use. A larger allowance often took noise of 3% a step for such a tie.
THRIFT = 0.005
LEAST_SPARED = 0.03
# Ratio of standard deviation to median absolute deviation for normal noise, and of the standard deviation of a median
# to that of a mean (asymptotically, the median's variance is pi / 2 times the mean's). Rough, as samples are few.
STD_PER_MAD = 1.4826
# Where the second slowest of a trial's steps takes this many times as long as the second fastest, its median hangs on
# chance: something makes steps slow by moments.
SPREAD = 1.3
STD_OF_MEDIAN = math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class Candidate:
    """One way to reduce gradients, which the tuner can try.

    Attributes:
        fusion_mb: target size of a fusion group in MiB; plain all-reduce ignores it.
        schedule: when legs are sent.
        as_built: whether plain all-reduce takes DDP's buckets as they were before attach, not our small ones.
        is_coded: whether legs carry codes of gradients.
    """

    fusion_mb: float
    schedule: Schedule = Schedule.AUTO
    as_built: bool = False
    is_coded: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fusion_mb) and self.fusion_mb > 0):
            raise ValueError(f"fusion_mb={self.fusion_mb!r}: give a size in MiB greater than 0")
        object.__setattr__(self, "schedule", Schedule(self.schedule))  # a string, if it was read from a file
        if self.as_built and not self.is_plain:
            raise ValueError("as_built=True: DDP's own buckets go with schedule='allreduce'")
        if self.is_coded and self.is_plain:
            raise ValueError("is_coded=True: plain all-reduces carry gradients as they are")

    @property
    def is_plain(self) -> bool:
        """Whether nothing is pipelined."""
        return self.schedule is Schedule.ALLREDUCE

    def __str__(self) -> str:
        if self.as_built:
            return "DDP as it was"
        if self.is_plain:
            return "plain all-reduces"
        gathers = " (schedule dear)" if self.schedule is Schedule.DEAR else ""
        return f"{self.fusion_mb:.3g} MiB{' of codes' if self.is_coded else ''}{gathers}"


@dataclass(frozen=True)
class Trial:
    """Consecutive training steps under one candidate.

    Attributes:
        candidate: the candidate under which the steps ran.
        steps_s: length of each step in seconds, without warm-up steps. Never empty.
        processor_s: seconds of processors that a step has taken, on average over steps and ranks; 0 if not measured.
    """

    candidate: Candidate
    steps_s: tuple[float, ...]
    processor_s: float = 0.0

    @property
    def median_s(self) -> float:
        return median(self.steps_s)

    @property
    def is_spread(self) -> bool:
        """Whether more than one step was far slower than others."""
        in_order = sorted(self.steps_s)
        return len(in_order) > 3 and in_order[-2] > SPREAD * in_order[1]


class TrialLog:
    """All trials so far. Times are corrected as if all trials had run on the machine in its current state.

    A shared machine or link gets slower and faster during the measurements. Candidates that were tried more than once
    show by how much; a steady drift is estimated from them and removed from all trials.

    Attributes:
        trials: all trials in the order in which they ran.
    """

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def count(self, candidate: Candidate) -> int:
        return sum(trial.candidate == candidate for trial in self.trials)

    def candidates(self, *schedules: Schedule) -> list[Candidate]:
        """The candidates of these schedules that were tried, in the order of their first trials."""
        tried = dict.fromkeys(trial.candidate for trial in self.trials)
        return [candidate for candidate in tried if candidate.schedule in schedules]

    def steps(self, candidate: Candidate) -> int:
        return sum(len(trial.steps_s) for trial in self.trials if trial.candidate == candidate)

    def time_s(self, candidate: Candidate) -> float:
        """The candidate's median step time in seconds, corrected to the current state of the machine."""
        drift, last = self._drift(), len(self.trials) - 1
        return median(
            step_s * math.exp(drift * (last - index))
            for index, trial in enumerate(self.trials)
            if trial.candidate == candidate
            for step_s in trial.steps_s
        )

    def processor_s(self, candidate: Candidate) -> float:
        """Seconds of processors that a step takes under a candidate, the least of its trials: others share a host."""
        return min(trial.processor_s for trial in self.trials if trial.candidate == candidate)

    def faster(self, one: Candidate, other: Candidate) -> bool:
        """Whether ``one`` is faster than ``other`` by more than the noise, and by more than 1%."""
        margin = max(MIN_GAIN, math.hypot(self._noise(one), self._noise(other)))
        return self._gain(one, other) > margin

    def seems_faster(self, one: Candidate, other: Candidate) -> bool:
        """Whether ``one`` was faster than ``other`` by more than 1%, which may be noise."""
        return self._gain(one, other) > MIN_GAIN

    def seemingly_fastest(self) -> Candidate:
        """The candidate with the shortest steps, which may be noise."""
        return min(dict.fromkeys(trial.candidate for trial in self.trials), key=self.time_s)

    def fastest(self) -> Candidate:
        """The fastest pipelined candidate; an earlier one is kept unless a later one is clearly faster, or thriftier.

        One with codes must be clearly faster than all without, since codes cost accuracy.
        """
        coded, as_they_are = self.fastest_if(is_coded=True), self.fastest_if(is_coded=False)
        if coded is None or as_they_are is None:
            best = coded or as_they_are
            assert best is not None
            return best
        return coded if self.faster(coded, as_they_are) else as_they_are

    def fastest_if(
        self, *, is_coded: bool, schedules: Sequence[Schedule] = (Schedule.DEAR, Schedule.AUTO)
    ) -> Candidate | None:
        """The same among the candidates with or without codes, the simpler schedule first; None if there is none."""
        alike = [each for schedule in schedules for each in self.candidates(schedule) if each.is_coded == is_coded]
        best = alike[0] if alike else None
        for other in alike[1:]:
            if best is not None and (self.faster(other, best) or self._thriftier(other, best)):
                best = other
        return best

    def plain(self) -> Candidate | None:
        """DDP as it was before attach if that was tried, unless plain all-reduce in small buckets is clearly faster."""
        if not (tried := sorted(self.candidates(Schedule.ALLREDUCE), key=lambda plain: plain.as_built)):
            return None
        *small, best = tried
        return next((other for other in small if self.faster(other, best)), best)

    def winner(self) -> Candidate:
        """The fastest pipelined candidate if it is clearly faster than all plain ones, else :meth:`plain`."""
        fastest, plain = self.fastest(), self.plain()
        beaten = all(self.faster(fastest, other) for other in self.candidates(Schedule.ALLREDUCE))
        return fastest if beaten or plain is None else plain

    def _thriftier(self, one: Candidate, other: Candidate) -> bool:
        """Whether ``one`` takes less of the processors' time, and is hardly slower."""
        spares = self.processor_s(one) < (1 - LEAST_SPARED) * self.processor_s(other)
        return spares and self._gain(other, one) < THRIFT

    def _gain(self, one: Candidate, other: Candidate) -> float:
        """Natural logarithm of how many times as fast ``one`` is."""
        return math.log(self.time_s(other) / self.time_s(one))

    def _noise(self, candidate: Candidate) -> float:
        """Relative standard deviation of :meth:`time_s`, from the spread of all trials."""
        return self._step_noise() * STD_OF_MEDIAN / math.sqrt(self.steps(candidate))

    def _step_noise(self) -> float:
        """Relative standard deviation of one step time in a trial."""
        deviations = [abs(step_s / trial.median_s - 1) for trial in self.trials for step_s in trial.steps_s]
        return STD_PER_MAD * median(deviations)

    def _drift(self) -> float:
        """Natural logarithm of the slow-down of the machine from one trial to the next; 0 if not known.

        The slope of a straight line through the slow-downs between repeated trials of the same candidate.
        """
        pairs = itertools.combinations(enumerate(self.trials), 2)
        alike = [(j - i, early, late) for (i, early), (j, late) in pairs if early.candidate == late.candidate]
        slower = sum(math.log(late.median_s / early.median_s) for _, early, late in alike)
        return slower / sum(apart for apart, _, _ in alike) if alike else 0.0
