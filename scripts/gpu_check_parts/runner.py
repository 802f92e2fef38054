"""Runs the cases of one part after another, or side by side, in the time that the part has; writes the record."""

import argparse
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rich.console import Console

from bench_kit import record
from bench_kit.ranks import Figures, Outcome, run_check
from bench_kit.tables import say
from gpu_check_parts import report
from gpu_check_parts.case import Case
from gpu_check_parts.report import Row

# No case begins with less time than this.
LEAST_S = 8.0


class Part(NamedTuple):
    """A part, which can be run alone.

    Attributes:
        name: as on the command line.
        learns: what is known afterwards, in one line.
        limit_s: time limit; cases that do not fit in are not run.
        run: runs its cases.
    """

    name: str
    learns: str
    limit_s: float
    run: Callable[["Runner"], None]


class Runner:
    """Runs cases, part by part.

    Args:
        args: the command line.
        console: told at once how each case went.
        about: hardware and versions, for the record.

    Attributes:
        device: of the ranks, such as `cuda:0`.
        rows: all cases so far.
    """

    def __init__(self, args: argparse.Namespace, console: Console, about: dict[str, str]) -> None:
        self.device = "cpu" if args.device == "cpu" else "cuda:0"
        self.rows: list[Row] = []
        self.console = console
        self._args = args
        self._about = about
        self._start_s = time.monotonic()
        self._part = ""
        self._part_ends_s = float("inf")
        self._lock = threading.Lock()
        self._under_way: dict[int, Row] = {}

    @property
    def elapsed_s(self) -> float:
        """Since the first case."""
        return time.monotonic() - self._start_s

    def run_part(self, part: Part) -> None:
        """Run one part; a case that fails stops nothing."""
        limit_s = min(part.limit_s, self._args.budget_s or part.limit_s)
        self._part, self._part_ends_s = part.name, time.monotonic() + limit_s
        self.console.print(f"[bold]{part.name}[/]: {part.learns} (at most {limit_s:.0f} s)", highlight=False)
        part.run(self)

    def wants(self, case: Case) -> bool:
        """Whether `--only` selects this case."""
        name = f"{case.group}: {case.name}".lower()
        return not self._args.only or any(text.lower() in name for text in self._args.only)

    @property
    def left_s(self) -> float:
        """What is left of the time of the part."""
        return self._part_ends_s - time.monotonic()

    def run_all(self, cases: Iterable[Case]) -> None:
        chosen = [case for case in cases if self.wants(case)]
        together = [case for case in chosen if not case.alone]
        with ThreadPoolExecutor(self._args.jobs) as pool:
            list(pool.map(self._run, together))
        for case in chosen:
            if case.alone:
                self._run(case)

    def skip_all(self, cases: Iterable[Case], reason: str) -> None:
        """Note that these cases cannot be done here."""
        for case in cases:
            if self.wants(case):
                self._finish(Row(self._part, case, _skipped(reason)))

    def _run(self, case: Case) -> None:
        """Run one case and say at once how it went."""
        row = Row(self._part, case, self.outcome(case))
        self._finish(row)
        style = report.STYLES[row.outcome.result]
        line = f"[{style}]{row.outcome.result:>7}[/] {case.group}: {case.name} ({row.outcome.seconds:.1f} s)"
        self.console.print(line, highlight=False)
        if row.outcome.result == "ok" and row.note:
            say(self.console, f"        {row.note}")

    def outcome(self, case: Case) -> Outcome:
        """Run a case if that is possible, and judge its outcome."""
        if case.needs_cuda and self.device == "cpu":
            return _skipped("needs a GPU")
        left_s = self.left_s
        if left_s < LEAST_S:
            return Outcome("not run", [], f"the time of the part {self._part} was used up", 0.0)
        limit_s = min(case.limit_s or self._args.timeout_s, left_s)

        def keep(figures: list[Figures]) -> None:
            outcome = Outcome("under way", list(figures), "", time.monotonic() - began_s)
            with self._lock:
                self._under_way[id(case)] = Row(self._part, case, outcome)
            self.write()

        began_s = time.monotonic()
        outcome = run_check(case.check, case.arguments, case.launch, limit_s, keep)
        with self._lock:
            self._under_way.pop(id(case), None)
        digests = {figures["digest"] for figures in outcome.figures if "digest" in figures}
        if outcome.result == "ok" and len(digests) > 1:
            return outcome._replace(result="FAIL", detail="ranks ended with different parameters")
        return outcome

    def failed(self) -> bool:
        """Whether a case failed or was not run for lack of time."""
        return any(row.outcome.result in ("FAIL", "not run") for row in self.rows)

    def write(self, *, ended: bool = False) -> None:
        """Write the record, with what the cases under way have measured so far."""
        with self._lock:
            content: dict[str, Any] = {
                "environment": self._about,
                "elapsed_s": round(self.elapsed_s, 1),
                "ended": ended,
                "cases": [row.as_json() for row in (*self.rows, *self._under_way.values())],
            }
            record.write(content, self._args.json)

    def _finish(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
        self.write()


def _skipped(reason: str) -> Outcome:
    return Outcome("skip", [], reason, 0.0)
