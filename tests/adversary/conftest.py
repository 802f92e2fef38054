"""Ends a run with what became of the loops."""

from __future__ import annotations

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many loops really were pipelined, and why the others were not."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        outcome = dict(report.user_properties).get("loop")
        if outcome is not None:
            counts[outcome["outcome"]] += 1
            if terminalreporter.config.option.verbose > 0:
                rest = {key: value for key, value in outcome.items() if value and key != "outcome"}
                terminalreporter.write_line(f"{report.nodeid.split('::')[-1]}: {outcome['outcome']} {rest}")
    if counts:
        terminalreporter.write_line("loops: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
