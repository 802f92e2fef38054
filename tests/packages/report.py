"""Counts by class, reasons, and what must not be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .campaign import Result

KINDS = {
    "deferred": "exact, and updates are deferred",
    "waits": "exact, and steps wait for all gradients",
    "refused": "refused by name",
    "wrong": "differs from plain DDP",
    "crash": "raises, dies or hangs, and plain DDP does not",
    "plain does not repeat": "two runs of plain DDP differ",
    "plain fails": "plain DDP raises, dies or hangs",
}
FAILURES = ("wrong", "crash")
NOT_COUNTED = ("plain does not repeat", "plain fails")


def failures(results: Sequence[Result]) -> list[str]:
    """A text for each configuration and mode that is wrong or crashes."""
    return [
        f"{result.configuration}\n  {mode}: {verdict.kind}: {verdict.detail}"
        for result in results
        for mode, verdict in result.verdicts.items()
        if verdict.kind in FAILURES
    ]


def counts(results: Sequence[Result], mode: str) -> Counter[str]:
    """Of a mode, how many configurations ended as what."""
    return Counter(result.verdicts[mode].kind for result in results)


def table(results: Sequence[Result], modes: Sequence[str]) -> str:
    """Counts by class and mode, then each reason with its count."""
    packages = {result.configuration.package for result in results}
    lines = [f"{len(results)} configurations of {len(packages)} packages", ""]
    lines.append(" " * 48 + "".join(f"{mode:>18}" for mode in modes))
    for kind, meaning in KINDS.items():
        figures = [counts(results, mode)[kind] for mode in modes]
        if any(figures):
            lines.append(f"{meaning:48}" + "".join(f"{figure:18}" for figure in figures))
    for mode in modes:
        for kind in ("waits", "refused", *NOT_COUNTED):
            reasons = Counter(
                _short(result.verdicts[mode].detail) for result in results if result.verdicts[mode].kind == kind
            )
            if reasons:
                lines += ["", f"{mode}, {KINDS[kind]}:"]
                lines += [f"{count:6d}  {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """All results, for a file."""
    return [
        {
            "requirement": result.configuration.requirement,
            "loop": result.configuration.loop,
            "expression": result.configuration.expression,
            "seconds": round(result.seconds, 1),
            "modes": {mode: verdict._asdict() for mode, verdict in result.verdicts.items()},
        }
        for result in results
    ]


def _short(reason: str) -> str:
    """A reason without what differs from optimizer to optimizer."""
    first = reason.partition("; ")[0]
    first = re.sub(r"\b\w+(?= updates in optimizer\.step| keeps|'s )", "...", first)
    return re.sub(r"(/[\w.-]+)+\.py", lambda path: path.group().rpartition("/")[2], first)[:160]
