"""Runs a user's script to its end, and shows what it said if that was a bad one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

_TAIL_LINES = 30
_BETWEEN_LOOKS_S = 0.25


def run_script(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    has_result: Callable[[], bool],
    why_not: str,
    note: str = "",
) -> str:
    """Return what the script has printed.

    Args:
        command: the script and its arguments, with the interpreter.
        environment: environment variables of the process.
        has_result: whether the script has left what it was run for.
        why_not: why it may have left nothing, in words that follow "the script".
        note: what else belongs to the error, for example which run it was.

    Raises:
        ValueError: if it has failed, or left nothing; the message ends with its last lines.
    """
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode or not has_result():
        why = f"ended with exit status {done.returncode}" if done.returncode else why_not
        output = "\n".join(done.stdout.splitlines()[-_TAIL_LINES:])
        raise ValueError(f"the script {why}{note}:\n{output}")
    return done.stdout


@contextmanager
def progress(what: str, steps_made: Callable[[], int], steps: int) -> Iterator[None]:
    """Show on stderr what goes on in the context: the steps so far on a terminal, and how long it took.

    Args:
        what: what goes on, in words.
        steps_made: returns the number of steps made so far.
        steps: how many there will be.
    """
    start_s = time.monotonic()
    is_over = threading.Event()

    def show() -> None:
        while not is_over.wait(_BETWEEN_LOOKS_S):
            _write(f"\r{what} ... {steps_made()} of {steps} steps, {time.monotonic() - start_s:.0f} s ")

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


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
