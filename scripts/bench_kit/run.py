"""Runs the cases of a bench one after the other: progress, a table and the files after each, the exit code."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from bench_kit import record
from bench_kit.display import Display
from bench_kit.launch import CaseFailed, OnProgress, RunRanks
from lab import LabError

REFUSED_EXIT_CODE = 2


class Case(Protocol):
    """The settings of one case."""

    @property
    def name(self) -> str:
        """The case in one short phrase."""


@dataclass(frozen=True)
class Bench:
    """What `run_cases` needs to know of a bench.

    Attributes:
        name: begins its error messages.
        network: gives, while it is entered, the function that runs ranks.
        measure: measures one case and returns its part of the record.
        print_case: prints that part, given a console, the part and the configuration's `network`.
        draw: draws the whole record as a chart, for `--plot`.
        way_out: added to the message where no lab can be built.
    """

    name: str
    network: AbstractContextManager[RunRanks]
    measure: Callable[[Any, RunRanks, OnProgress], dict[str, Any]]
    print_case: Callable[[Console, dict[str, Any], str], None]
    draw: record.Draw | None = None
    way_out: str = ""


def run_cases(bench: Bench, cases: Sequence[Case], args: argparse.Namespace, configuration: dict[str, Any]) -> int:
    """Run all cases; returns 2 if the lab cannot be built, 1 if a case failed, else 0."""
    console = Console()
    result: dict[str, Any] = {"configuration": configuration, "cases": []}
    record.show_configuration(configuration)
    try:
        with bench.network as run_ranks, Display(console, len(cases)) as display:
            for settings in cases:
                display.begin(settings.name)
                case = bench.measure(settings, run_ranks, display.update)
                bench.print_case(console, case, configuration["network"])
                result["cases"].append(case)
                record.write(result, args.json, args.plot if bench.draw else None, bench.draw)
    except LabError as error:
        print(f"{bench.name}: {error}{bench.way_out}", file=sys.stderr)
        return REFUSED_EXIT_CODE
    except CaseFailed as error:
        print(f"{bench.name}: {error}", file=sys.stderr)
        return 1
    return 0
