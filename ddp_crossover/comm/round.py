"""One exchange of messages between ranks: what each peer fills, what to send, and what is computed from it.

Rounds know no threads and no tags.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor


class Slice(NamedTuple):
    """Memory to send to one peer, or to fill with what one peer sends."""

    peer: int
    memory: Tensor


class Round(ABC):
    """One exchange of messages. The order of the calls: ``receives``, ``sends``, ``finish``."""

    @abstractmethod
    def receives(self) -> list[Slice]:
        """What each peer fills; may be asked for long before the other two."""

    @abstractmethod
    def sends(self) -> list[Slice]:
        """What to send, once all earlier rounds are finished."""

    def finish(self) -> None:  # noqa: B027
        """Compute the result from what was received."""

    def release(self) -> None:  # noqa: B027
        """Give memory back that messages of this round have used, because both legs have ended."""


class Rounds(NamedTuple):
    """What both legs of a fusion group do, round by round."""

    scatter: list[Round]
    gather: list[Round]

    def release(self) -> None:
        """Give memory back, because both legs have ended."""
        for one in (*self.scatter, *self.gather):
            one.release()
