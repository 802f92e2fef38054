"""Runs many programs: draws them, lets hypothesis shrink what fails, goes on with other seeds, and counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from .drawing import programs
from .pool import FuzzPool
from .program import Choices, Program

# So many programs share one seed of hypothesis: it learns from what it has drawn, and repeats itself.
OF_ONE_SEED = 50


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
        pairs: how often two features have met in a program without a failure.
    """

    counts: Counter[str] = field(default_factory=Counter)
    programs: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)


class _Failed(AssertionError):
    """A program has failed; hypothesis shrinks it."""


def campaign(
    pool: FuzzPool,
    *,
    first_seed: int,
    count: int,
    fixed: Choices | None = None,
    tuned: bool = False,
    shrinks: bool = True,
    on_progress: Callable[[Report], None] = lambda report: None,
    most_failures: int = 1_000_000,
    seconds: float = float("inf"),
) -> Report:
    """Run `count` programs from `first_seed` on; goes on after failures."""
    report, at = Report(), first_seed
    start_s = time.monotonic()
    while report.programs < count and time.monotonic() - start_s < seconds and len(report.failures) < most_failures:
        _run_seed(pool, report, at, min(OF_ONE_SEED, count - report.programs), fixed, tuned, shrinks, on_progress)
        at += 1
    return report


def _run_seed(
    pool: FuzzPool,
    report: Report,
    at: int,
    count: int,
    fixed: Choices | None,
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
    @given(programs(pool.ranks, fixed, tuned))
    def run(program: Program) -> None:
        start_s = time.monotonic()
        outcome = pool.judge(program)
        if not smallest:
            report.programs += 1
            report.seconds += time.monotonic() - start_s
            report.counts.update(outcome.counts)
            if not outcome.failure:
                report.pairs.update(pairs_of(program))
            on_progress(report)
        if outcome.failure:
            smallest[:] = [Failure(program, outcome.failure)]
            raise _Failed

    before = report.programs
    try:
        run()
    except _Failed:
        report.failures.append(smallest[0])
        on_progress(report)
    if report.programs == before:
        report.programs += 1  # hypothesis has found nothing new to draw


def pairs_of(program: Program) -> Iterator[tuple[str, str]]:
    """All pairs of features that meet in a program."""
    of_script = {f"{name}={value}" if isinstance(value, str) else name for name, value in program.script.items()}
    names = {*of_script, *(event.name for event in program.events)}
    for arm in program.arms:
        every = sorted(names | {f"{name}={value}" if isinstance(value, str) else name for name, value in arm.items()})
        for index, one in enumerate(every):
            for other in every[index + 1 :]:
                yield one, other
