"""Measures when the gather legs of an iteration arrive, and what forward computes before it waits for each.

On a GPU by events, which are read later: the host is ahead of it.
"""

from __future__ import annotations

import time
from typing import NamedTuple, TypeAlias

from ddp_crossover import device as gpu
from ddp_crossover.addons.lease.sharing.forward_start import Use
from ddp_crossover.comm.stream_order import CudaStreams

Moment: TypeAlias = "float | gpu.Event"


class DeviceClock:
    """Moments of compute: on a GPU events of its stream, else host time as of ``time.perf_counter()``.

    Args:
        streams: the streams of the device; None on a CPU.
    """

    def __init__(self, streams: CudaStreams | None) -> None:
        self._streams = streams

    def now(self) -> Moment:
        if self._streams is None:
            return time.perf_counter()
        return gpu.record(self._streams.current(), timed=True)

    @staticmethod
    def has_happened(moment: Moment) -> bool:
        return isinstance(moment, float) or bool(moment.query())


class Begin(NamedTuple):
    """The begin of a forward, at which the device has nothing else to do: so the host's time is the device's."""

    host_s: float
    device: Moment


class _Wait(NamedTuple):
    before: Moment
    arrived: Moment
    resumed: Moment


class ForwardTimes:
    """The times of one iteration, from the end of a backward to the end of the next forward.

    Args:
        end: the end of the backward.

    Attributes:
        begin: the begin of the forward; None before.
    """

    def __init__(self, end: Moment) -> None:
        self.begin: Begin | None = None
        self._end = end
        self._waits: list[_Wait] = []

    def waited(self, before: Moment, arrived: Moment, resumed: Moment) -> None:
        """Note a wait: when forward came to it, when the leg had arrived, and when forward could go on."""
        self._waits.append(_Wait(before, arrived, resumed))

    def begins(self, begin: Begin) -> None:
        """Note that forward begins, behind its first wait."""
        self.begin = begin

    def are_known(self) -> bool:
        """Whether the device has come to the end of all waits."""
        moments = [moment for wait in self._waits for moment in wait]
        if self.begin is not None:
            moments.append(self.begin.device)
        return all(DeviceClock.has_happened(moment) for moment in moments)

    def uses(self) -> list[Use]:
        """All waits, where they are known; empty if no forward has begun."""
        begin = self.begin
        if begin is None:
            return []
        begin_s, stalled_s, uses = self.since_end_s(begin), 0.0, []
        for place, wait in enumerate(self._waits):
            before_s, arrived_s, resumed_s = (self._at_s(moment) for moment in wait)
            # The first wait is over when forward begins.
            uses.append(Use(arrived_s, before_s - begin_s - stalled_s if place else 0.0))
            stalled_s += max(0.0, resumed_s - before_s) if place else 0.0
        return uses

    def begin_s(self) -> float:
        """When forward began, in seconds from the end of backward on."""
        assert self.begin is not None
        return self.since_end_s(self.begin)

    def since_end_s(self, moment: Begin) -> float:
        """Seconds from the end of backward to a moment at which the device has nothing to do."""
        if isinstance(self._end, float):
            return moment.host_s - self._end
        assert not isinstance(moment.device, float)
        return gpu.seconds_between(self._end, moment.device)

    def _at_s(self, moment: Moment) -> float:
        """When something happened, in seconds from the end of backward on."""
        if not isinstance(moment, float):
            assert not isinstance(self._end, float)
            return gpu.seconds_between(self._end, moment)
        assert self.begin is not None
        return moment - self.begin.host_s + self.begin_s()
