"""Runs a user's script three times on a throw-away copy of all files: plain, attached, and plain again."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ddp_crossover.addons.launch.compare import why_different
from ddp_crossover.addons.launch.errand import STEPS_MADE, Errand, environment_with
from ddp_crossover.addons.launch.meeting import Meeting
from ddp_crossover.addons.launch.throw_away import OFFLINE, inside, throw_away_copy
from ddp_crossover.log import without_speaker
from ddp_crossover.options import SWITCH

ARMS = ("plain", "attached", "plain again")

_TAIL_LINES = 30
_BETWEEN_LOOKS_S = 0.25
# What is said of training that is not synchronized.
_APART = ("so ranks train apart", "trains on its own", "so it reduces nothing", "so plain DDP does not reduce")
# How the kernel refuses what the copy has not, or not for this user.
_NOT_IN_COPY = ("Read-only file system", "Value too large for defined data type")


class ThreeRuns(NamedTuple):
    """What the runs have left.

    Attributes:
        records: of each run, the record of each rank that this process has started, several if the script starts them
            itself.
        why_not_attached: why nothing was attached to in the attached run, if nothing was.
        unsynchronized: one sentence about parameters that ranks have differently; None if all are the same.
    """

    records: list[dict[int, Path]]
    why_not_attached: str
    unsynchronized: str | None


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how the script is run."""
    parser.add_argument("--show-output", action="store_true", help="show what the script prints, as it comes")
    parser.add_argument("--in-place", action="store_true", help="let the script write for real")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")


@contextmanager
def three_runs(command: list[str], errand: Errand, meeting: Meeting, args: argparse.Namespace) -> Iterator[ThreeRuns]:
    """Run the script plain, attached, and plain again; yields what they have left, whose files are gone afterwards.

    Args:
        command: the script and its arguments, with the interpreter.
        errand: of the attached run, without a folder.
        meeting: of all ranks.
        args: see ``add_run_arguments``.

    Raises:
        ValueError: if the script fails, or leaves nothing.
    """
    name = errand.recorded_for
    with ExitStack() as stack:
        stack.enter_context(_sigterm_raises())

        def make() -> str:
            return stack.enter_context(tempfile.TemporaryDirectory(prefix=f"ddp_crossover-{name}-"))

        folder = Path(meeting.of_this_machine(make))
        records, outputs = [], {}
        for number, arm in enumerate(ARMS, 1):
            (folder / arm).mkdir(exist_ok=True)
            options = errand.options if arm == "attached" else None
            environment = environment_with(replace(errand, options=options, folder=str(folder / arm)))
            environment |= {**OFFLINE, SWITCH: "on" if arm == "attached" else "off"} | meeting.environment()
            with _copy_for(folder, meeting, args, say_why_not=number == 1) as command_in_copy:
                what = f"{name}: run {number} of {len(ARMS)}, {arm}"
                with _progress(what, folder / arm, errand.steps) if meeting.rank == 0 else nullcontext():
                    outputs[arm] = _run(command_in_copy(command), environment, arm, shows=args.show_output)
                records.append(_records_in(folder / arm))
                if not records[-1]:
                    why = "has trained no DDP model, or for too few steps"
                    raise ValueError(f"the script {why} ({arm}){_last(outputs[arm])}")
                meeting.gather(None)  # or the copy would be dropped while others use it
        attached = outputs["attached"]
        parameters = _parameters(records[0], meeting)
        yield ThreeRuns(
            records, _why_not_attached(attached, meeting), why_different(parameters, _why_apart(attached, meeting))
        )
        meeting.part()


def _records_in(folder: Path) -> dict[int, Path]:
    rank = os.environ.get("RANK") or "*"
    return {int(file.stem): file for file in sorted(folder.glob(f"{rank}.json"))}


def _why_not_attached(output: str, meeting: Meeting) -> str:
    """Why nothing was attached to, as rank 0 has printed it."""
    why = [line for line in output.splitlines() if "trains as plain DDP" in line]
    unsaid = "the script never calls the DDP model that it has built, or the model has a communication hook"
    return str(meeting.gather((*why, unsaid)[0])[0])


def _why_apart(output: str, meeting: Meeting) -> str | None:
    """Why ranks train apart, as rank 0 has printed it; None if it has not."""
    why = [line for line in output.splitlines() if any(text in line for text in _APART)]
    said: str | None = meeting.gather(without_speaker(why[0]) if why else None)[0]
    return said


def _parameters(records: Mapping[int, Path], meeting: Meeting) -> list[dict[str, str]]:
    """The digests of parameters of all ranks of the job at the end of a run."""
    mine = [json.loads(file.read_text())["parameters"] for file in records.values()]
    return [one for of_process in meeting.gather(mine) for one in of_process]


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Context in which SIGTERM, which torchrun sends when a rank fails, leaves no files behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _copy_for(
    folder: Path, meeting: Meeting, args: argparse.Namespace, *, say_why_not: bool
) -> Iterator[Callable[[list[str]], list[str]]]:
    """What makes a command run on a copy of the files of this machine, if there can be one."""
    with ExitStack() as stack:

        def make() -> str:
            try:
                if args.in_place:
                    raise OSError("--in-place was given")
                return str(stack.enter_context(throw_away_copy(folder)))
            except OSError as error:
                if say_why_not:
                    _write(f"The script's own writes happen for real, also over its checkpoints and logs: {error}.\n")
                return ""

        keeper = meeting.of_this_machine(make)
        yield lambda command: inside(int(keeper), command) if keeper else command


def _run(command: Sequence[str], environment: Mapping[str, str], arm: str, *, shows: bool) -> str:
    """What the script has printed; ValueError with its last lines if it has failed."""
    lines = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as script:
        assert script.stdout is not None
        try:
            for line in script.stdout:
                lines.append(line)
                if shows:
                    _write(line)
        except BaseException:
            script.terminate()  # else this would wait for the end of training
            raise
    output = "".join(lines)
    if script.returncode:
        hint = ""
        if any(text in output for text in _NOT_IN_COPY):
            hint = ". It ran on a throw-away copy of the files, without this path; --in-place lets it write for real"
        raise ValueError(f"the script ended with exit status {script.returncode} ({arm}){hint}{_last(output)}")
    return output


def _last(output: str) -> str:
    return "".join([":\n", *output.splitlines(keepends=True)[-_TAIL_LINES:]])


@contextmanager
def _progress(what: str, folder: Path, steps: int) -> Iterator[None]:
    """Show on stderr what goes on in the context: the steps so far on a terminal, and how long it took."""
    start_s = time.monotonic()
    is_over = threading.Event()

    def show() -> None:
        while not is_over.wait(_BETWEEN_LOOKS_S):
            _write(f"\r{what} ... {_steps_made(folder)} of {steps} steps, {time.monotonic() - start_s:.0f} s ")

    _write(f"{what} ... ")
    shower = threading.Thread(target=show) if sys.stderr.isatty() else None
    if shower is not None:
        shower.start()
    how = "failed after "
    try:
        yield
        how = ""
    finally:
        is_over.set()
        if shower is not None:
            shower.join()
            _write(f"\r{what} ... \x1b[K")
        _write(f"{how}{time.monotonic() - start_s:.1f} s\n")


def _steps_made(folder: Path) -> int:
    """How many steps rank 0 has made so far."""
    try:
        text = (folder / STEPS_MADE).read_text()
    except FileNotFoundError:
        return 0
    return int(text) if text.endswith("\n") else 0  # caught in the middle of a write


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
