"""Ranks that live through thousands of programs, and start anew after one that hangs, crashes or raises."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from harness import RankFailure, RankPool

from .program import Program
from .ranks import Verdict, judge
from .refusals import refusal

SECONDS = 60.0
"""For a program, which takes one or two on a machine that does nothing else."""
GROUP_TIMEOUT_S = 30.0


class Outcome(NamedTuple):
    """How a program ended, over all of its arms.

    Attributes:
        failure: what is wrong, in some lines; empty if nothing is.
        counts: its arms by how they ended.
    """

    failure: str
    counts: Counter[str]


@dataclass
class FuzzPool:
    """Judges programs on real ranks."""

    ranks: int
    seconds: float = SECONDS
    _pool: RankPool | None = field(default=None, init=False)

    def judge(self, program: Program) -> Outcome:
        """Run a program, and say how it ended."""
        try:
            of_ranks = self.verdicts(program)
        except RankFailure as error:
            return Outcome(f"hangs or crashes: {error}", Counter(["hangs or crashes"]))
        return sum_up(program, of_ranks)

    def verdicts(self, program: Program) -> list[list[Verdict]]:
        """Run a program: for each rank the verdicts on its arms; `RankFailure` if it hangs or crashes."""
        if self._pool is None:
            self._pool = RankPool(self.ranks, group_timeout_s=GROUP_TIMEOUT_S)
            self._pool.run(judge, Program(self.ranks, arms=()).to_json())  # starts, which takes longer than programs
        limit_s = self.seconds + 0.3 * program.steps * len(program.arms)
        try:
            of_ranks: list[list[Verdict]] = self._pool.run(judge, program.to_json(), timeout_s=limit_s)
        except RankFailure:
            self._pool = None
            raise
        if any(verdict.kind in ("raises", "plain fails") for verdicts in of_ranks for verdict in verdicts):
            self.close()  # what was under way when it raised must not meet the next program
        return of_ranks

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.kill()
            self._pool = None

    def __enter__(self) -> FuzzPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sum_up(program: Program, of_ranks: list[list[Verdict]]) -> Outcome:
    """How a program ended, of all verdicts on it."""
    counts: Counter[str] = Counter()
    for index, arm in enumerate(program.arms):
        verdicts = [verdicts[index] for verdicts in of_ranks]
        kind, detail = _of_arm(verdicts)
        if kind == "fails":
            return Outcome(f"{program.with_arm(arm).to_json()}\n{detail}", Counter(["fails"]))
        counts[kind] += 1
    return Outcome("", counts)


def _of_arm(verdicts: list[Verdict]) -> tuple[str, str]:
    kinds = {verdict.kind for verdict in verdicts}
    if "plain fails" in kinds:
        (error, *_) = [verdict.detail for verdict in verdicts if verdict.kind == "plain fails"]
        lines = [line for line in error.strip().splitlines() if line[:1].isalpha() and "Error" in line]
        return f"plain DDP fails: {(lines or ['?'])[-1][:90]}", ""
    if "raises" in kinds:
        if kinds == {"raises"}:
            names = {refusal(verdict.detail) for verdict in verdicts}
            if None not in names and len(names) == 1:
                return f"refused: {names.pop()}", ""
        return "fails", "\n".join(f"rank {rank}: {v.kind}: {v.detail}" for rank, v in enumerate(verdicts))
    if "differs" in kinds:
        return "fails", "\n".join(f"rank {rank}: {v.kind}: {v.detail}" for rank, v in enumerate(verdicts))
    if len({verdict.digest for verdict in verdicts}) > 1 and len({v.plain_digest for v in verdicts}) == 1:
        return "fails", "ranks have different parameters or optimizer state"
    if not all(verdict.finite for verdict in verdicts):
        return "fails", "parameters are not finite"
    return "exact", ""
