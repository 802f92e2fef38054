"""Runs a user's script to its end, and shows what it said if that was a bad one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence

_TAIL_LINES = 30


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
