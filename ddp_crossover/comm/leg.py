"""Legs: handles of a reduce-scatter or an all-gather of a fusion buffer that is under way, and how they end.

A handle can be waited for, also by a signal handler. After the first failure of a link every later leg fails with it at
once, and not each after its own timeout.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ddp_crossover.device import Event


class Latch:
    """An event that is set once. A signal handler may wait for it even if it interrupted a wait for the same event.

    ``threading.Event`` would deadlock there: the interrupted wait may hold its internal lock.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            self._closed.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it is set, or for ``timeout_s`` seconds (-1: no limit); returns whether it is set."""
        # set() assigns is_set before it releases the lock. Each waiter takes the lock and passes it on; a signal
        # handler that interrupts a waiter in between sees is_set, and does not try to take the lock.
        if not self.is_set and self._closed.acquire(timeout=timeout_s):
            self._closed.release()
        return self.is_set


class HostWait(Protocol):
    """One wait for a leg, of the host or of a CUDA stream. Other jobs may use the device meanwhile."""

    def poll(self) -> float:
        """Called while the host waits; returns the number of seconds after which to call again."""

    def arrived(self, at_s: float) -> None:
        """Called with the host time, as of ``time.perf_counter()``, at which the leg ended that the host needs."""

    def before_stream_waits(self, done: Event) -> None:
        """Called before the current stream is made to wait for ``done``; blocks if the host must not run ahead.

        ``done`` is timed (:func:`ddp_crossover.device.seconds_between`) if a leg ends there.
        """


# Fusion groups are numbered from 0. The tag of a message has 16 bits for this number, see ``gloo_messages``.
MAX_GROUPS = 2**16 - 1


class LegError(RuntimeError):
    """A leg failed on this rank. The message names the rank, the leg and the fusion group."""


class Leg(ABC):
    """One leg under way.

    Attributes:
        label: name in messages, such as ``gather leg of fusion group 3``.
    """

    label: str

    @abstractmethod
    def wait(self, host_wait: HostWait | None = None) -> None:
        """Wait until the caller's later work can use the result and, after a gather leg, overwrite the buffer.

        On CUDA the current stream waits; the host waits, too, on gloo.

        Args:
            host_wait: polled repeatedly while the host waits, and told of a wait of the stream.

        Raises:
            LegError: if this leg or an earlier one failed.
        """

    @abstractmethod
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once."""


class ScatterLeg(Leg):
    """A reduce-scatter under way."""

    @abstractmethod
    def shards(self) -> list[Tensor]:
        """This rank's slice of each part of the buffer; after :meth:`wait` they hold the sums over ranks."""


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
        return self._errors[0] if self._errors else None

    def close(self) -> None:
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
