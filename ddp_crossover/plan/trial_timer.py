"""Times the steps of a trial, as long as they take on the slowest rank, while no other job disturbs them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from ddp_crossover.comm.agreement import all_gather_json
from ddp_crossover.comm.link import Link
from ddp_crossover.compute_waits import OtherJobs
from ddp_crossover.plan.compute_profiler import Stopwatch
from ddp_crossover.plan.tuner import TRIAL_STEPS, WARMUP_STEPS

# With new buckets, DDP's next step makes them and the one after it orders them.
_STEPS_OF_NEW_BUCKETS = 2
# Trials that another job disturbed are repeated, but not for ever: the tuner must end next to a job that never leaves.
_MAX_REPEATED_TRIALS = 5


class Timed(NamedTuple):
    """The steps of a trial.

    Attributes:
        steps_s: how long each one took on the slowest rank, in seconds, since ranks wait for each other.
        processors_s: how much of the processors' time each one took in a process, the mean of ranks, in seconds.
        exposed_s: the median seconds of a step in which this rank waited for legs; None if legs are not timed.
    """

    steps_s: list[float]
    processors_s: list[float]
    exposed_s: float | None


class TrialTimer:
    """Times one trial after another. All ranks must call each method in the same iteration.

    Args:
        link: link between the ranks.
        device: device of the parameters.
        others: tell whether they have disturbed a trial, which is then repeated.
        stopwatch: measures.
    """

    def __init__(self, link: Link, device: torch.device, others: OtherJobs, stopwatch: Stopwatch) -> None:
        self._link = link
        self._device = device
        self._stopwatch = stopwatch
        self._others = others
        self._disturbances = 0
        self._repeats_left = _MAX_REPEATED_TRIALS
        self._steps_to_skip = 0
        self._marks: list[Any] = []
        self._waits_s: list[float] = []
        self._processors_s: list[float] = []

    def reset(self) -> None:
        """Forget earlier trials: tuning begins anew."""
        self._repeats_left = _MAX_REPEATED_TRIALS

    def begin(self, *, has_new_buckets: bool) -> None:
        """Begin a trial, after the steps that DDP needs to get used to new buckets."""
        self._steps_to_skip = _STEPS_OF_NEW_BUCKETS if has_new_buckets else 0
        self._restart()

    def step_ends(self) -> bool:
        """Note the end of a step; returns whether the trial has had enough."""
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            self._restart()
            return False
        self._mark()
        return len(self._marks) > TRIAL_STEPS

    def end(self) -> Timed | None:
        """End the trial. A collective. None if it was disturbed, and has begun again."""
        times_s = self._stopwatch.seconds(self._marks, waits=True)
        steps_s = _differences(times_s)
        mine = {
            "steps_s": steps_s,
            "processors_s": _differences(self._processors_s),
            "disturbed": self._others.disturbances > self._disturbances,
        }
        of_ranks = all_gather_json(mine, self._link.process_group, self._device)
        if self._repeats_left and any(of_rank["disturbed"] for of_rank in of_ranks):
            # The step times include another job's turns.
            self._repeats_left -= 1
            self._restart()
            return None
        exposed_s = None
        if self._link.clock.sums().communication_s:  # not on NCCL, whose legs do not run in host time
            exposed_s = median(_differences(self._waits_s)[WARMUP_STEPS:])
        self._marks = []
        return Timed(
            [max(step) for step in zip(*(one["steps_s"] for one in of_ranks), strict=True)],
            [fmean(step) for step in zip(*(one["processors_s"] for one in of_ranks), strict=True)],
            exposed_s,
        )

    def _restart(self) -> None:
        self._marks, self._waits_s, self._processors_s = [], [], []
        self._mark()
        self._disturbances = self._others.disturbances

    def _mark(self) -> None:
        self._marks.append(self._stopwatch.mark())
        self._waits_s.append(self._link.clock.sums().exposed_s)
        self._processors_s.append(time.process_time())


def _differences(marks: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(marks)]
