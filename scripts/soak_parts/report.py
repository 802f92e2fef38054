"""The table of a soak, and its verdict in a few lines."""

from typing import Any

from rich.console import Console

from bench_kit.tables import print_table, say
from soak_parts.verdict import Course

UNITS = {"rss_bytes": ("memory, MiB", 2**-20, ".1f"), "step_s": ("median step, ms", 1e3, ".2f")}


def print_report(console: Console, courses: list[Course], record: dict[str, Any]) -> None:
    """Print how each figure went, what ran, and the verdict."""
    headings = ("process", "figure", "first quarter", "last quarter", "its lowest", "")
    print_table(console, headings, map(_cells, courses), left=("figure",))
    for line in (*_what_ran(record), *record["differences"]):
        say(console, line)
    growing = ", ".join(record["growing"])
    say(
        console,
        f"{f'GROWING: {growing}' if growing else 'flat'}; parameters and optimizer state are "
        f"{'UNEQUAL to' if record['differences'] else 'bit for bit those of'} plain DDP",
    )


def _cells(course: Course) -> list[str]:
    label, factor, form = UNITS.get(course.figure, (course.figure, 1, ".0f"))
    numbers = [f"{factor * number:{form}}" for number in (course.first, course.last, course.lowest)]
    return [course.process, label, *numbers, "GROWS" if course.grows else "flat"]


def _what_ran(record: dict[str, Any]) -> list[str]:
    facts = record["runs"]["attached"][0]["facts"]
    plans = ", ".join(f"{times} times {plan}" for plan, times in facts["plans"].items())
    turns = ", ".join(str(neighbour["turns"]) for neighbour in record["runs"]["neighbours"])
    return [
        f"{facts['pipelined_steps']} of {facts['steps']} steps were pipelined; attached {facts['attached']} times",
        f"plans at the end of each time: {plans}",
        f"{facts['grants']} grants of the lease on rank 0, unleased {facts['unleased'] or 'never'}; "
        f"turns of the neighbours: {turns}",
        f"{record['seconds']['attached']:.0f} s with the package and its neighbours, "
        f"{record['seconds']['plain']:.0f} s of plain DDP alone",
    ]
