"""Legs: handles of a reduce-scatter or an all-gather of a fusion buffer that is under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from ddp_crossover.device import Event


class HostWait(Protocol):
    """One wait for a leg, of the host or of a CUDA stream. Other jobs may use the device meanwhile."""

    def poll(self) -> float:
        """Called while the host waits; returns the number of seconds after which to call again."""

    def before_stream_waits(self, done: Event) -> None:
        """Called before the current stream is made to wait for ``done``; blocks if the host must not run ahead."""


# Fusion groups are numbered from 0. The tag of a message has 16 bits for this number, see ``gloo_messages``.
MAX_GROUPS = 2**16 - 1


class LegError(RuntimeError):
    """A leg failed on this rank. The message names the rank, the leg and the fusion group."""


class Leg(ABC):
    """One leg under way.

    Attributes:
        label: name in messages, such as ``gather leg of fusion group 3``.
        is_posted: whether it is no longer held back, as gather legs may be while the link has other things to send.
    """

    label: str
    is_posted = True

    @abstractmethod
    def wait(self, host_wait: HostWait | None = None) -> None:
        """Wait until the caller's later work can use the result and, after a gather leg, overwrite the buffer.

        On CUDA the current stream waits; the host waits, too, on gloo.

        Args:
            host_wait: polled repeatedly while the host waits, and told of a wait of the stream.

        Raises:
            LegError: if this leg or an earlier one failed.
        """

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once; False if the host cannot tell."""
        return False


class ScatterLeg(Leg):
    """A reduce-scatter under way."""

    @abstractmethod
    def shards(self) -> list[Tensor]:
        """This rank's slice of each part of the buffer; after :meth:`wait` they hold the sums over ranks."""


def slice_bounds(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The range [low, high) of a flat buffer that ``rank`` reduces; equal if ``world_size`` divides ``numel``."""
    return numel * rank // world_size, numel * (rank + 1) // world_size
