"""Runs a soak: the run with the package, beside a broker and other jobs, and then the run without."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench_kit.launch import OnProgress, RunRanks, news_to, rank_environment
from bench_kit.lease_processes import start_broker
from soak_parts.settings import WORLD_SIZE, SoakSettings

ARMS = ("attached", "plain")
RANK = ["-m", "soak_parts.rank"]
NEIGHBOUR = Path(__file__).with_name("neighbour.py")


def conduct(
    steps: int, run_ranks: RunRanks, on_run: Callable[[str], None], on_progress: OnProgress
) -> tuple[dict[str, Any], dict[str, float]]:
    """Run both; returns samples and results of ranks by arm, with what the neighbours did; and seconds by arm.

    Args:
        steps: training steps of each run.
        run_ranks: runs a command once per rank.
        on_run: told which run begins.
        on_progress: told how far it is.

    Raises:
        CaseFailed: when a rank ended with an error.
    """

    def run(arm: str, watched: dict[str, int]) -> list[dict[str, Any]]:
        settings = SoakSettings(steps, directory, watched)
        settings_file = Path(directory, "settings.json")
        settings.write(settings_file)
        on_run(arm)
        began_s = time.monotonic()
        environment = rank_environment() | {"TMPDIR": directory}
        run_ranks([*RANK, str(settings_file), arm], environment, news_to(on_progress))
        seconds[arm] = time.monotonic() - began_s
        return [_read(settings, arm, rank) for rank in range(WORLD_SIZE)]

    seconds: dict[str, float] = {}
    # Only this user may enter it, and all sockets and files are in it.
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        with _neighbours(directory) as (neighbours, watched):
            attached = run("attached", watched)
            answers = [json.loads(neighbour.communicate("stop\n")[0]) for neighbour in neighbours]
        return {"attached": attached, "plain": run("plain", {}), "neighbours": answers}, seconds


@contextmanager
def _neighbours(directory: str) -> Iterator[tuple[list[subprocess.Popen[str]], dict[str, int]]]:
    """A broker and a job on each core that want turns as well, and the process ids of all of them by name."""
    with ExitStack() as stack:
        broker = start_broker(Path(directory), stack)
        neighbours = [_neighbour(stack, directory, core) for core in range(WORLD_SIZE)]
        for neighbour in neighbours:
            assert neighbour.stdout is not None
            if (line := neighbour.stdout.readline()) != "ready\n":
                raise RuntimeError(f"{neighbour.args!r} did not start: it wrote {line!r}")
        pids = {f"neighbour {core}": neighbour.pid for core, neighbour in enumerate(neighbours)}
        yield neighbours, {"broker": broker} | pids


def _neighbour(stack: ExitStack, directory: str, core: int) -> subprocess.Popen[str]:
    """A job on one core; it is killed when the stack ends. Without site-packages it starts in a tenth of a second."""
    command = [sys.executable, "-I", "-S", str(NEIGHBOUR), directory, f"cpu:{core}"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def _read(settings: SoakSettings, arm: str, rank: int) -> dict[str, Any]:
    samples = [json.loads(line) for line in settings.samples(arm, rank).read_text().splitlines()]
    return {"samples": samples, **json.loads(settings.result(arm, rank).read_text())}
