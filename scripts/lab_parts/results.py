"""The results of a run of the lab, and its error."""

import signal
from collections.abc import Sequence
from typing import NamedTuple

TAIL_LINES = 20


class HostResult(NamedTuple):
    """How one host's command ended. A negative `returncode` is the signal that ended it."""

    rank: int
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def how_it_failed(self) -> str:
        """Its rank, how it ended, and its last output."""
        how = f"exit code {self.returncode}"
        if self.returncode < 0:
            how = f"signal {signal.Signals(-self.returncode).name}"
        tail = "\n".join((self.stderr.strip() or self.stdout.strip()).splitlines()[-TAIL_LINES:])
        return f"{self.rank} ended with {how}" + (f"; its last output:\n{tail}" if tail else "")


class LabError(Exception):
    """The lab cannot be built, a host failed, or time ran out.

    `results` holds the output of every host, and is empty if nothing ran. `failed_rank` is the host that
    failed first, and None after a timeout.
    """

    def __init__(self, message: str, results: Sequence[HostResult] = (), failed_rank: int | None = None) -> None:
        super().__init__(message)
        self.results = list(results)
        self.failed_rank = failed_rank
