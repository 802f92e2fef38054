"""The online tuner: tries group sizes on real training steps and keeps the fastest.

Pure: takes step times and returns candidates; uses no clock and no torch.distributed. The tuner is a deterministic
state machine: ranks that feed it the same times switch together without further communication. They must agree on
the times first, for example on those of the slowest rank.

The next candidate depends only on the measurements so far, so a conclusion that a later trial overturns is simply
replaced. Candidates are tried in this order:

1. The start, which is the best according to the cost model, the schedule of the paper in groups cut without a model,
   with codes the best without, plain all-reduce, and DDP as it was before attach.
2. The neighbours of the fastest size of ``AUTO`` so far on the log2 grid, past those that cut the model into the same
   groups. A faster neighbour takes its place, so this walks downhill.
3. A golden section of the way to a measured neighbour, if step times are known to rise on at least one side.
4. The winner, the best plain one, that of the other schedule and with codes the best without (or with) again, if they
   were measured only once: the lowest of several noisy times is too low on average, and the choice between these should
   not depend on the state of the machine at the start. When trials run out, this comes before 2 and 3.
5. A run-off: as long as another one seems faster than the winner, but not clearly, or is as fast with the other
   schedule, both again in turns, a few times.

What is hardly slower and spares processor time wins, and of what cannot be told apart the simpler schedule.

A trial whose step times are spread goes on, a few times in all: where ranks are slow by moments, the median of five
steps may be that of slow ones.

Accuracy, simulated on 80 curves of each kind from starts within two octaves of the best size: without noise the result
is within 3% of the best time (worst 2.8%). With 3% noise in every step and a drift of up to 15%, it is for 99% of
smooth curves (worst 6.3%) and for 93% of curves with a kink (worst 5.9%). After a sudden jump of 10%, it is for 95% and
70% (worst 11.8%). Where the schedule of the paper takes 0.9 to 1.1 times the best of these times, with 2% noise, the
result is within 3% of the better for 99% of 60 smooth curves each, and within 5% for 98% where the machine gets slower
and faster by 6% meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median

from ddp_crossover.fusion import MB, Schedule
from ddp_crossover.log import short
from ddp_crossover.plan.trials import Candidate, Trial, TrialLog

# The first step after a switch is not typical: the old plan's gather legs are missing and the buffers are new. The
# median of five steps tolerates two more outliers.
WARMUP_STEPS = 1
MEASURED_STEPS = 5
TRIAL_STEPS = WARMUP_STEPS + MEASURED_STEPS
# How often trials may go on in all, each time by as many steps as a trial has, and how often one of them.
MAX_EXTENSIONS = 6
MAX_EXTENSIONS_OF_TRIAL = 2
# Trials of a run-off, beyond the others.
MAX_RUN_OFFS = 4

# What takes this many times as long is slower, however the machine has drifted.
FAR = 1.08

GOLDEN = (3 - math.sqrt(5)) / 2
# The largest group size to try, in MiB.
HIGH_MB = 64.0
# In octaves: sizes closer to each other than this are not worth a trial between them.
MIN_GAP = 0.45


@dataclass(frozen=True)
class TuningResult:
    """What the tuner found.

    Attributes:
        best: candidate to train with from now on.
        best_s: its step time in seconds, corrected to the state of the machine at the end (see :class:`TrialLog`).
        fastest: the fastest pipelined candidate; equals ``best`` unless that is plain all-reduce.
        fastest_s: step time of ``fastest`` in seconds, corrected likewise.
        plain: DDP as it was, or plain all-reduce in small buckets if that is clearly faster or the only one tried; None
            if neither was tried.
        plain_s: step time of ``plain`` in seconds, corrected likewise; that of ``best`` if there is none.
        trials: all trials in the order in which they ran, uncorrected.
        steps: number of training steps used, warm-up included.
        reason: why the tuner stopped.
        declined: the fastest candidate with codes, if one without is not clearly slower.
        declined_s: its step time in seconds, corrected likewise.
    """

    best: Candidate
    best_s: float
    fastest: Candidate
    fastest_s: float
    plain: Candidate | None
    plain_s: float
    trials: tuple[Trial, ...]
    steps: int
    reason: str
    declined: Candidate | None = None
    declined_s: float = 0.0

    def describe(self) -> str:
        """The result in one line: step times as measured, in this run, of the winner and of what it was compared to."""
        line = self._describe_best()
        if self.declined is None:
            return line
        return (
            f"{line}; gradients travel as they are: groups of {self.declined} took {_ms(self.declined_s)} ms, which is "
            "no clear gain (set fusion_mb to use codes anyway)"
        )

    def _describe_best(self) -> str:
        fastest, plain = _ms(self.fastest_s), _ms(self.plain_s)
        if self.plain is None:
            return f"{fastest} ms a step, in groups of {self.best}"
        if self.best.is_plain:
            others = f"groups of {self.fastest} took {fastest} ms, which is no clear gain"
            return f"{self.best}, {plain} ms a step: {others} (set fusion_mb to use the pipeline anyway)"
        times = f"{self.plain_s / self.best_s:.2f} times as fast"
        return f"{fastest} ms a step instead of {plain} with {self.plain} ({times}), in groups of {self.best}"


class Tuner:
    """Proposes candidates, takes their step times, and ends with a :class:`TuningResult`.

    Args:
        start: first candidate, the best according to the cost model. With ``Schedule.ALLREDUCE`` plain all-reduce is
            tried first, and the search for a better size begins at ``fusion_mb``.
        model_bytes: bytes of all gradients; groups are never larger.
        tries_as_built: whether DDP's buckets as they were before attach can be had.
        tries_plain: whether plain all-reduces can be had at all.
        as_they_are: if ``start`` has codes, the first candidate without.
        dear: the candidate with the schedule of the paper, or None.
        max_trials: maximum number of trials, repeats included and those of a run-off not, each 6 training steps, and up
            to 18 where these are spread; at least 3.
        low_mb: smallest group size to try, in MiB.
        groups_of: the groups of a candidate with ``Schedule.AUTO``, to compare: of sizes that make the same groups, one
            is tried. The same on all ranks.

    Attributes:
        candidate: candidate under which the next step must run.
        result: the result, or None while the tuner runs.

    Example::

        tuner = Tuner(Candidate(8.0), model_bytes=100 * MB)
        switch_to(tuner.candidate)
        while tuner.result is None:
            step_s = train_one_step()
            if (candidate := tuner.observe(step_s)) is not None:
                switch_to(candidate)
    """

    def __init__(
        self,
        start: Candidate,
        *,
        model_bytes: int,
        tries_as_built: bool = False,
        tries_plain: bool = True,
        as_they_are: Candidate | None = None,
        dear: Candidate | None = None,
        max_trials: int = 10,
        low_mb: float = 0.25,
        groups_of: Callable[[Candidate], object] = lambda candidate: candidate.fusion_mb,
    ) -> None:
        self._high_mb = min(HIGH_MB, model_bytes / MB)
        self._low_mb = min(low_mb, self._high_mb)
        self._max_trials = max_trials
        self._groups_of = groups_of
        auto = self._at(math.log2(start.fusion_mb), is_coded=start.is_coded)
        plain = Candidate(auto.fusion_mb, Schedule.ALLREDUCE)
        as_built = [replace(plain, as_built=True)] if tries_as_built else []
        # Next to each other: a change of DDP's buckets costs two steps.
        self._first = [*as_built, plain, auto] if start.schedule is Schedule.ALLREDUCE else [auto, plain, *as_built]
        if not tries_plain:
            self._first = [auto]
        for other in (as_they_are, dear):
            if other is not None:
                self._first.insert(self._first.index(auto) + 1, other)
        self._log = TrialLog()
        self._steps_s: list[float] = []
        self._processor_s: list[float] = []
        self._steps = 0
        self._extensions_left = MAX_EXTENSIONS
        self._run_offs = 0
        self.candidate = self._first[0]
        self.result: TuningResult | None = None

    def observe(self, step_s: float, processor_s: float = 0.0) -> Candidate | None:
        """Record one training step that ran under ``candidate``.

        Args:
            step_s: how long it took, in seconds.
            processor_s: how much of the processors' time it took, in seconds.

        Returns the candidate to switch to before the next step, or None to stay. Times that arrive after the result
        is known are ignored.
        """
        if self.result is not None:
            return None
        self._steps_s.append(step_s)
        self._processor_s.append(processor_s)
        self._steps += 1
        if len(self._steps_s) % TRIAL_STEPS:
            return None
        trial = Trial(self.candidate, tuple(self._steps_s[WARMUP_STEPS:]), fmean(self._processor_s[WARMUP_STEPS:]))
        may_go_on = self._extensions_left and len(self._steps_s) <= MAX_EXTENSIONS_OF_TRIAL * TRIAL_STEPS
        if trial.is_spread and may_go_on:
            self._extensions_left -= 1
            return None
        self._log.trials.append(trial)
        previous = self.candidate
        choice = self._next()
        if isinstance(choice, str):
            self.result = self._conclude(choice)
            choice = self.result.best
        self.candidate = choice
        # A candidate tried twice in a row needs no warm-up, but trials of equal length are simpler to count.
        self._steps_s, self._processor_s = [], []
        return choice if choice != previous else None

    def progress(self) -> str:
        """The current trial and the best candidate so far in one line, for logs."""
        if self.result is not None:
            return self.result.describe()
        measured = self._steps_s[WARMUP_STEPS:]
        now = f"{_ms(median(measured))} ms" if measured else "warming up"
        line = f"tuning {len(self._log.trials) + 1}/{self._max_trials + self._run_offs}: {self.candidate}: {now}"
        if len(self._log.trials) < len(self._first):
            return line
        best = self._log.winner()
        return f"{line}, best {_ms(self._log.time_s(best))} ms at {best}"

    def _conclude(self, reason: str) -> TuningResult:
        best, fastest, plain = self._log.winner(), self._log.fastest(), self._log.plain()
        coded = self._log.fastest_if(is_coded=True)
        declined = coded if coded is not None and not best.is_coded else None
        return TuningResult(
            best=best,
            best_s=self._log.time_s(best),
            fastest=fastest,
            fastest_s=self._log.time_s(fastest),
            plain=plain,
            plain_s=self._log.time_s(best if plain is None else plain),
            trials=tuple(self._log.trials),
            steps=self._steps,
            reason=reason,
            declined=declined,
            declined_s=0.0 if declined is None else self._log.time_s(declined),
        )

    def _next(self) -> Candidate | str:
        """The next candidate to try, or the reason to stop."""
        trials = len(self._log.trials) - self._run_offs
        if trials == self._max_trials:
            return self._run_off() or f"the budget of {self._max_trials} trials is spent"
        for candidate in self._first:
            if not self._log.count(candidate):
                return candidate
        winner, fastest = self._log.winner(), self._log.fastest()
        plain = self._log.plain()
        rival = self._log.fastest_if(is_coded=not fastest.is_coded)
        compared = dict.fromkeys((winner, rival, plain, self._of_other_schedule(fastest)))
        unconfirmed = [c for c in compared if c is not None and self._log.count(c) == 1]
        if unconfirmed and self._max_trials - trials <= len(unconfirmed):
            return unconfirmed[0]
        auto = self._log.fastest_if(is_coded=fastest.is_coded, schedules=(Schedule.AUTO,))
        probe = auto and (self._neighbour(auto) or self._between(auto))
        if probe is not None or unconfirmed:
            return probe or unconfirmed[0]
        return self._run_off() or f"no neighbour of {fastest} was faster"

    def _of_other_schedule(self, fastest: Candidate) -> Candidate | None:
        """The fastest with the other pipelined schedule, unless it is far slower."""
        schedule = Schedule.DEAR if fastest.schedule is Schedule.AUTO else Schedule.AUTO
        other = self._log.fastest_if(is_coded=fastest.is_coded, schedules=(schedule,))
        return other if other is not None and self._log.time_s(other) < FAR * self._log.time_s(fastest) else None

    def _run_off(self) -> Candidate | None:
        """Of the winner and its rival, who was tried for fewer steps; None if there is nothing to tell.

        The rival seems faster, or has the other schedule and may be: what is not clearly faster does not win, so noise
        favours what was there, and costs what it hides. Steps in which two near-ties take turns cost nothing.
        """
        if self._run_offs == MAX_RUN_OFFS:
            return None
        winner, rival = self._log.winner(), self._log.seemingly_fastest()
        if not self._log.seems_faster(rival, winner):
            other = None if winner.is_plain else self._of_other_schedule(winner)
            if other is None or self._log.faster(winner, other):
                return None
            rival = other
        self._run_offs += 1
        return min(rival, winner, key=self._log.steps)

    def _neighbour(self, best: Candidate) -> Candidate | None:
        """The nearest candidate with other groups on a side where nothing has been tried; None if there is none."""
        for side in (-1, 1):
            probe = None if self._beside(best, side) else self._next_on(best, side)
            if probe is not None:
                return probe
        return None

    def _next_on(self, best: Candidate, side: int) -> Candidate | None:
        """The nearest candidate on this side with other groups, in octaves; None if the bound comes first."""
        probe = best
        while self._groups_of(probe) == self._groups_of(best):
            nearer, probe = probe, self._at(_octave(probe) + side, is_coded=best.is_coded)
            if abs(_octave(probe) - _octave(nearer)) < MIN_GAP:
                return None
        return probe

    def _between(self, best: Candidate) -> Candidate | None:
        """A golden section of the way to the faster neighbour that is at least ``MIN_GAP`` away.

        None if there is none with groups of its own, or if step times rise on neither side.
        """
        ends = [beside[0] for side in (-1, 1) if (beside := self._beside(best, side))]
        if not any(self._log.faster(best, end) for end in ends):
            return None
        for end in sorted(ends, key=self._log.time_s):
            gap = _octave(end) - _octave(best)
            probe = self._at(_octave(best) + GOLDEN * gap, is_coded=best.is_coded)
            if abs(gap) >= MIN_GAP and self._groups_of(probe) not in map(self._groups_of, (best, end)):
                return probe
        return None

    def _beside(self, best: Candidate, side: int) -> list[Candidate]:
        """Candidates tried on this side of ``best`` (-1: smaller sizes, 1: larger), nearest first."""
        alike = [c for c in self._log.candidates(Schedule.AUTO) if c.is_coded == best.is_coded]
        found = [c for c in alike if (_octave(c) - _octave(best)) * side > 0]
        return sorted(found, key=lambda c: abs(_octave(c) - _octave(best)))

    def _at(self, octave: float, *, is_coded: bool) -> Candidate:
        """The candidate of ``2**octave`` MiB, clamped to the bounds and rounded to three digits for readability."""
        return Candidate(min(max(float(f"{2**octave:.3g}"), self._low_mb), self._high_mb), is_coded=is_coded)


def _octave(candidate: Candidate) -> float:
    return math.log2(candidate.fusion_mb)


def _ms(seconds: float) -> str:
    return short(1e3 * seconds)
