"""Runs many programs: draws them, lets hypothesis shrink what fails, goes on with other seeds, and counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import FlakyFailure

from .drawing import programs
from .pairs import Meetings, Wanted, pairs_of
from .pool import FuzzPool
from .program import Program

# So many programs share one seed of hypothesis: it learns from what it has drawn, and repeats itself.
OF_ONE_SEED = 50
# For a pair of features that has met least.
OF_ONE_PAIR = 3


@dataclass
class Failure:
    """A program that failed, as small as hypothesis could make it."""

    program: Program
    detail: str


@dataclass
class Report:
    """What a campaign has found.

    Attributes:
        counts: arms by how they ended.
        programs: programs drawn, without those tried in shrinking.
        seconds: of these.
        failures: all that failed.
        meetings: how often two features have met in a program without a failure.
    """

    counts: Counter[str] = field(default_factory=Counter)
    programs: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    meetings: Meetings = field(default_factory=Meetings)


class _Failed(AssertionError):
    """A program has failed; hypothesis shrinks it."""


def campaign(
    pool: FuzzPool,
    *,
    first_seed: int,
    count: int,
    wanted: Wanted | None = None,
    meetings: Meetings | None = None,
    least: int = 0,
    tuned: bool = False,
    shrinks: bool = True,
    on_progress: Callable[[Report], None] = lambda report: None,
    most_failures: int = 1_000_000,
    seconds: float = float("inf"),
) -> Report:
    """Run `count` programs from `first_seed` on; goes on after failures.

    With `least`, a few programs each are drawn for the pair of features that has met least, until every one has met so
    often; `meetings` is what earlier campaigns have seen.
    """
    wanted = wanted or Wanted()
    report, at = Report(meetings=meetings or Meetings()), first_seed
    start_s = time.monotonic()
    while report.programs < count and time.monotonic() - start_s < seconds and len(report.failures) < most_failures:
        of_seed, here = OF_ONE_SEED, wanted
        if least:
            pair = report.meetings.next(least)
            if pair is None:
                break
            of_seed, here = OF_ONE_PAIR, wanted | pair
        _run_seed(pool, report, at, min(of_seed, count - report.programs), here, tuned, shrinks, on_progress)
        at += 1
    return report


def _run_seed(
    pool: FuzzPool,
    report: Report,
    at: int,
    count: int,
    wanted: Wanted,
    tuned: bool,
    shrinks: bool,
    on_progress: Callable[[Report], None],
) -> None:
    smallest: list[Failure] = []

    @seed(at)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        report_multiple_bugs=False,
    )
    @given(programs(pool.ranks, wanted, tuned))
    def run(program: Program) -> None:
        start_s = time.monotonic()
        outcome = pool.judge(program)
        if not smallest:
            report.programs += 1
            report.seconds += time.monotonic() - start_s
            report.counts.update(outcome.counts)
            if not outcome.failure:
                report.meetings.counts.update(set(pairs_of(program)))
            on_progress(report)
        if outcome.failure:
            smallest[:] = [Failure(program, outcome.failure)]
            raise _Failed

    before = report.programs
    try:
        run()
    except (_Failed, FlakyFailure):  # the second, if it did not fail again
        report.failures.append(smallest[0])
        on_progress(report)
    if report.programs == before:
        report.programs += 1  # hypothesis has found nothing new to draw
