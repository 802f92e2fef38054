"""Starts the ranks of a case: on the lab's hosts, or as processes over loopback."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_parts.settings import CaseSettings
from lab import Lab, LabError

ROOT = Path(__file__).resolve().parents[2]
OnProgress = Callable[[str, float], None]
# Long enough for BERT-base at 1 Gb/s with all arms; a case that hangs is ended by the ranks' own timeout.
CASE_TIMEOUT_S = 4 * 3600.0
RunRanks = Callable[[list[str], dict[str, str], Callable[[str], None]], None]


class CaseFailed(Exception):
    """A rank did not end well; holds what it printed."""


def run_case(settings: CaseSettings, run_ranks: RunRanks, on_progress: OnProgress) -> dict[str, Any]:
    """Measure one case; returns what `rank.Rank.run` returned on rank 0.

    Args:
        settings: the case.
        run_ranks: runs a command once per rank with these additional environment variables, and hands on
            each line that a rank prints.
        on_progress: told what the ranks do, and the share of all work that is behind.
    """

    def on_line(line: str) -> None:
        if line.startswith('{"doing"'):
            news = json.loads(line)
            on_progress(news["doing"], news["behind"])

    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        settings_file, result_file = Path(directory, "settings.json"), Path(directory, "result.json")
        settings.write(settings_file)
        run_ranks(["-m", "bench_parts.rank", str(settings_file), str(result_file)], rank_environment(), on_line)
        result: dict[str, Any] = json.loads(result_file.read_text())
    return result


def rank_environment() -> dict[str, str]:
    """What a rank needs beside torchrun's variables."""
    paths = [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def over_loopback(world_size: int) -> RunRanks:
    """Ranks as processes of this machine, started by torchrun. No network lies between them."""

    def run_ranks(arguments: list[str], environment: dict[str, str], on_line: Callable[[str], None]) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        job = subprocess.Popen(
            [sys.executable, *torchrun, *arguments],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert job.stdout is not None
        lines = []
        try:
            for line in job.stdout:
                on_line(line)
                lines.append(line)
            if job.wait() != 0:
                raise CaseFailed("".join(line for line in lines if not line.startswith('{"doing"')))
        finally:
            if job.poll() is None:
                # torchrun ends its ranks when it is told to go.
                os.killpg(job.pid, signal.SIGTERM)
                job.wait()

    return run_ranks


def on_hosts(lab: Lab) -> RunRanks:
    """Ranks on the hosts of a lab, one each."""

    def run_ranks(arguments: list[str], environment: dict[str, str], on_line: Callable[[str], None]) -> None:
        try:
            lab.run(
                [sys.executable, *arguments],
                env=environment,
                timeout_s=CASE_TIMEOUT_S,
                on_line=lambda rank, stream, line: on_line(line),
            )
        except LabError as error:
            raise CaseFailed(str(error)) from error

    return run_ranks
