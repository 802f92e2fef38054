"""Legs: one reduce-scatter or one all-gather of a fusion buffer, under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor


class Meanwhile(Protocol):
    """What is done with the time of a wait."""

    def __call__(self) -> float:
        """The host waits: says after how many seconds to call again."""

    def is_worth_blocking(self) -> bool:
        """Whether the host should wait although the leg does not need it to."""


class LegError(RuntimeError):
    """A leg failed on this rank: names the rank, the leg and the fusion group."""


class Leg(ABC):
    """One leg under way.

    Attributes:
        label: what it is in messages, such as ``gather leg of fusion group 3``.
    """

    label: str

    @abstractmethod
    def wait(self, meanwhile: Meanwhile | None = None) -> None:
        """After this, the caller's work sees the result, and after a gather leg may write into the buffer.

        Args:
            meanwhile: called while the host waits.

        Raises:
            LegError: if the leg failed, or one before it did.
        """

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once; False where only the device knows."""
        return False


class ScatterLeg(Leg):
    """A reduce-scatter under way."""

    @abstractmethod
    def shard(self) -> Tensor:
        """This rank's slice of the buffer; holds the sum over ranks after :meth:`wait`."""


def slice_bounds(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Elements of a flat buffer that ``rank`` reduces. Even when ``numel`` divides by ``world_size``."""
    return numel * rank // world_size, numel * (rank + 1) // world_size
