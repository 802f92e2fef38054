"""Runs configurations one after another, on ranks that each package has for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NamedTuple

from harness import RankFailure, RankPool

from .listed import Configuration
from .ranks import AT_ATTACH, PLAIN, Verdict, judge

RANKS = 2
SECONDS = 90.0
"""For a configuration, which takes one or two; but some compile."""
GROUP_TIMEOUT_S = 60.0


class Result(NamedTuple):
    """How a configuration ended: for each mode the worst verdict of the ranks."""

    configuration: Configuration
    verdicts: dict[str, Verdict]
    seconds: float


class Ranks:
    """Ranks that live until something breaks, or the next package comes: some change torch when they are imported."""

    def __init__(self, site: str = "", seconds: float = SECONDS) -> None:
        self._site, self._seconds = site, seconds
        self._pool: RankPool | None = None
        self._package = ""

    def judge(self, configuration: Configuration, modes: tuple[str, ...]) -> Result:
        """Train a configuration in all modes."""
        started = time.monotonic()
        if self._package != configuration.package:
            self.close()
        verdicts: dict[str, Verdict] = {}
        # What breaks in one mode says nothing of those after it.
        while left := tuple(mode for mode in modes if mode not in verdicts):
            verdicts |= self._judge(configuration, left)
            if verdicts[left[0]].kind == "plain fails":
                verdicts |= dict.fromkeys(modes, verdicts[left[0]])
        return Result(configuration, {mode: verdicts[mode] for mode in modes}, time.monotonic() - started)

    def _judge(self, configuration: Configuration, modes: tuple[str, ...]) -> dict[str, Verdict]:
        if self._pool is None:
            self._pool = RankPool(RANKS, group_timeout_s=GROUP_TIMEOUT_S)
            self._package = configuration.package
        try:
            answers = self._pool.run(judge, tuple(configuration), modes, self._site, timeout_s=self._seconds)
        except RankFailure as error:
            self._pool = None
            if modes == (PLAIN,):
                return {PLAIN: Verdict("plain fails", str(error))}
            if len(modes) > 1:  # which one it was in is not known
                return self._judge(configuration, modes[:1])
            plain = self._judge(configuration, (PLAIN,))[PLAIN]  # which arm it was in is not known, either
            self.close()
            return {modes[0]: plain if plain.kind == "plain fails" else Verdict("crash", str(error))}
        of_ranks = [{mode: Verdict(*verdict) for mode, verdict in answer.items()} for answer in answers]
        verdicts = {
            mode: max((of_rank[mode] for of_rank in of_ranks), key=_badness)
            for mode in modes
            if all(mode in of_rank for of_rank in of_ranks)
        }
        if any(_broke_off(verdict) for verdict in verdicts.values()):
            self.close()
        return verdicts

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.kill()
            self._pool = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def campaign(
    configurations: Iterable[Configuration],
    modes: tuple[str, ...],
    *,
    site: str = "",
    seconds: float = SECONDS,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Judge all configurations.

    Args:
        configurations: what to train, the same package's beside each other.
        modes: of `ranks.MODES`.
        site: a folder with packages that this environment lacks.
        seconds: the limit for a configuration.
        on_result: called after each.
    """
    results = []
    with Ranks(site, seconds) as ranks:
        for configuration in configurations:
            results.append(ranks.judge(configuration, modes))
            on_result(results[-1])
    return results


def _broke_off(verdict: Verdict) -> bool:
    """Whether something may still be under way that must not meet the next configuration."""
    return verdict.kind in ("crash", "plain fails") or (verdict.kind == "refused" and AT_ATTACH not in verdict.detail)


def _badness(verdict: Verdict) -> int:
    order = ("plain", "deferred", "waits", "refused", "plain does not repeat", "plain fails", "wrong", "crash")
    return order.index(verdict.kind)
