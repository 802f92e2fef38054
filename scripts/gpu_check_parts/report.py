"""The output of the check: machine and versions, a table, and the reasons of failures."""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape

from bench_kit.ranks import Outcome
from bench_kit.tables import print_table
from gpu_check_parts.case import Case

STYLES = {"ok": "green", "FAIL": "bold red", "skip": "yellow", "not run": "bold red"}


class Row(NamedTuple):
    """One case of a part, and what became of it."""

    part: str
    case: Case
    outcome: Outcome

    @property
    def largest_difference(self) -> float | None:
        """Over all ranks and values, from plain DDP."""
        found = [f["largest_difference"] for f in self.outcome.figures if "largest_difference" in f]
        return max(found) if found else None

    @property
    def pipelined(self) -> str:
        """Pipelined iterations out of all, on rank 0."""
        return next((str(rank["pipelined"]) for rank in self.outcome.figures if "pipelined" in rank), "")

    @property
    def note(self) -> str:
        """What was noticed, or the reason, in one line."""
        if self.outcome.result in ("ok", "under way"):
            noticed = dict.fromkeys(str(rank["noticed"]) for rank in self.outcome.figures if rank.get("noticed"))
            dead = [
                f"rank {rank} died {found['died_after_s']:.1f} s later, {found['died']}"
                for rank, found in enumerate(self.outcome.figures)
                if "died" in found and rank != self.case.launch.victim
            ]
            return "; ".join([*noticed, *dead])
        return self.outcome.detail if self.outcome.result == "skip" else reason_of(self.outcome)

    def as_json(self) -> dict[str, Any]:
        launch = self.case.launch
        return {
            "part": self.part,
            "group": self.case.group,
            "case": self.case.name,
            "backend": launch.backend,
            "devices": list(launch.devices),
            "environment": dict(launch.environment),
            "result": self.outcome.result,
            "largest_difference": self.largest_difference,
            "pipelined": self.pipelined,
            "seconds": round(self.outcome.seconds, 2),
            "detail": self.outcome.detail,
            "ranks": self.outcome.figures,
        }


def reason_of(outcome: Outcome) -> str:
    """The line of a failure's detail that says most."""
    lines = outcome.detail.split("\n--- output of rank", 1)[0].strip().splitlines()
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failure)\b", line)]
    return (raised or lines or [""])[-1]


def environment(device_type: str) -> dict[str, str]:
    """Hardware and versions."""
    about = {
        "machine": f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": str(torch.version.cuda),
    }
    if device_type == "cuda":
        names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        about["GPUs"] = "; ".join(
            f"{p.name}, {p.total_memory / 2**30:.0f} GiB, capability {p.major}.{p.minor}" for p in names
        )
        about["driver"] = _driver()
        about["NCCL"] = ".".join(map(str, nccl_version()))
    else:
        about["GPUs"] = "none used: this is a rehearsal on the CPU and says nothing about a GPU"
    return about


def nccl_version() -> tuple[int, ...]:
    """Version of the NCCL library that torch has loaded."""
    version = torch.cuda.nccl.version()
    return tuple(version) if isinstance(version, tuple) else (0,)


def print_header(console: Console, about: dict[str, str]) -> None:
    """One line for each fact."""
    for name, value in about.items():
        console.print(f"[bold]{name}[/]: {escape(value)}", highlight=False)


def print_results(console: Console, rows: Sequence[Row], elapsed_s: float) -> None:
    """The table, the details of what failed, and a line with the count."""
    headings = ("part", "check", "case", "ranks", "result", "max diff", "pipelined", "s", "note")
    texts = ("check", "case", "note")
    print_table(console, headings, map(_cells, rows), left=("result",), wrapped=texts, box=box.SIMPLE_HEAD)
    for row in rows:
        if row.outcome.result == "FAIL":
            console.rule(escape(f"{row.case.group}: {row.case.name}"), style="red")
            console.print(escape(row.outcome.detail), highlight=False)
    counts = {result: sum(row.outcome.result == result for row in rows) for result in STYLES}
    summary = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    console.print(f"{len(rows)} cases in {elapsed_s:.0f} s: {summary or 'nothing to do'}", highlight=False)


def _cells(row: Row) -> list[str]:
    case, outcome, gap = row.case, row.outcome, row.largest_difference
    return [
        row.part,
        escape(case.group),
        escape(case.name),
        str(len(case.launch.devices)),
        f"[{STYLES[outcome.result]}]{outcome.result}[/]",
        "" if gap is None else ("0" if gap == 0 else f"{gap:.1e}"),
        row.pipelined,
        f"{outcome.seconds:.1f}",
        escape(row.note[:400]),
    ]


def _driver() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__} from nvidia-smi)"
    return ", ".join(sorted(set(done.stdout.split())))
