"""Waits of compute for other ranks: who is told of them, and who else may use the device meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from ddp_crossover.comm.leg import HostWait
from ddp_crossover.device import Stream
from ddp_crossover.moments import Moments

_NO_GAP: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class OtherJobs(Protocol):
    """Who else may use the device while compute waits."""

    @property
    def disturbances(self) -> int:
        """How often another job has wanted or held the device so far."""

    def resume(self) -> None:
        """Have the device before compute, if it is this job's turn."""

    def release(self) -> None:
        """Let others have the device: no compute follows until the next turn."""

    def released(self) -> contextlib.AbstractContextManager[None]:
        """Let others have the device during a blocking exchange between ranks."""

    def gap(
        self, what: Hashable, last_has_arrived: Callable[[], bool] | None = None
    ) -> contextlib.AbstractContextManager[HostWait | None]:
        """Let others have the device during a wait; yields what to poll meanwhile, if anything.

        Before a forward it may last beyond the wait, until compute can run through: ``last_has_arrived()`` tells that
        no more waits are to come.
        """

    def before_stream_waits(self, stream: Stream) -> None:
        """Note that the current stream is going to wait for all that is queued on ``stream`` now."""


class NoOtherJobs:
    """This job has the device for itself."""

    disturbances = 0

    def resume(self) -> None:
        pass

    def release(self) -> None:
        pass

    def released(self) -> contextlib.AbstractContextManager[None]:
        return _NO_GAP

    def gap(
        self, what: Hashable, last_has_arrived: Callable[[], bool] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        return _NO_GAP

    def before_stream_waits(self, stream: Stream) -> None:
        pass


class ComputeWaits:
    """What waits of one model's training go through.

    Args:
        moments: tells those who measure compute.
        others: who else may use the device.

    Attributes:
        others: the same, to be told where compute begins and ends between waits.
    """

    def __init__(self, moments: Moments, others: OtherJobs) -> None:
        self._moments = moments
        self.others = others

    def of(
        self, what: Hashable, last_has_arrived: Callable[[], bool] | None = None
    ) -> contextlib.AbstractContextManager[HostWait | None]:
        """The context of a wait of compute for other ranks.

        Args:
            what: key of the wait; waits with the same key take about the same time in each step.
            last_has_arrived: for one of the waits of a forward: whether all that they are for has arrived.

        Returns:
            A context manager that yields the object to poll while the host waits, or None if there is none.
        """
        # Every wait of every step comes here, usually with nobody to tell.
        if self._moments.inside.hears("waiting"):
            return self._told(what, last_has_arrived)
        return self.others.gap(what, last_has_arrived)

    @contextlib.contextmanager
    def _told(self, what: Hashable, last_has_arrived: Callable[[], bool] | None) -> Iterator[HostWait | None]:
        with self._moments.inside.waiting(what), self.others.gap(what, last_has_arrived) as host_wait:
            yield host_wait
