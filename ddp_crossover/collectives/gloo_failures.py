"""The first failure of a link: every later leg fails with it at once, and not each after its own timeout."""

from __future__ import annotations

from collections.abc import Callable

from ddp_crossover.collectives.leg import LegError


class Failures:
    """Records failures of legs. Any thread may call it; it takes no lock.

    Args:
        rank: this rank, for messages.
        on_failure: called after each failure that is recorded.

    Attributes:
        is_closed: whether the link is closed, so that no leg may start.
    """

    def __init__(self, rank: int, on_failure: Callable[[], None]) -> None:
        self.is_closed = False
        self._rank = rank
        self._on_failure = on_failure
        self._errors: list[LegError] = []  # several threads may append at the same time: the first one counts

    @property
    def first(self) -> LegError | None:
        """The first failure; None if there is none."""
        return self._errors[0] if self._errors else None

    def close(self) -> None:
        """Let no leg start from now on."""
        self.is_closed = True

    def check(self) -> None:
        """Raise the first failure, if there is one; raise ``RuntimeError`` if the link is closed."""
        if self._errors:
            raise self._errors[0].with_traceback(None)  # each raise would add its frames, and keep what they refer to
        if self.is_closed:
            raise RuntimeError("the communication threads of this DearState have been closed")

    def record(self, label: str, error: BaseException) -> LegError:
        """Record the failure of what ``label`` names; returns the first failure, with which other legs fail as well."""
        self._errors.append(self.describe(label, error))
        self._on_failure()
        return self._errors[0]

    def describe(self, label: str, error: BaseException) -> LegError:
        """The error as users see it; an error that is one already stays as it is."""
        if isinstance(error, LegError):
            return error
        return LegError(
            f"rank {self._rank}: the {label} failed: {error}. A peer has probably died or stopped "
            "answering; this process' gradients are incomplete, so end it and restart the job from a checkpoint"
        )
