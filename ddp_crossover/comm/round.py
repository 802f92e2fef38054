"""One exchange of messages between ranks: what each peer fills, what to send, and what is computed from it.

Rounds know no threads and no tags.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

# A peer, and the memory to send to it, or to fill with what it sends. Each leg makes two or more.
Slice = tuple[int, Tensor]


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
