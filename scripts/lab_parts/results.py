"""What a run of the lab gives, and what it raises."""

from collections.abc import Sequence
from typing import NamedTuple


class HostResult(NamedTuple):
    """What became of one host's command. A negative `returncode` is the signal that ended it."""

    rank: int
    returncode: int
    stdout: str
    stderr: str
    seconds: float


class LabError(Exception):
    """The lab cannot be built, a host failed, or time ran out.

    `results` holds what every host has said, empty if nothing ran; `failed_rank` the host that
    failed first, None after a timeout.
    """

    def __init__(self, message: str, results: Sequence[HostResult] = (), failed_rank: int | None = None) -> None:
        super().__init__(message)
        self.results = list(results)
        self.failed_rank = failed_rank
