"""When legs and waits begin and end: sums that are always kept, and spans while somebody traces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from ddp_crossover.tracing.trace import Moment, Trace


class LegTimes:
    """One leg under way: when it was handed to the link, and when it was posted to the network (NaN before)."""

    __slots__ = ("group", "kind", "posted_s", "started_s")

    def __init__(self, kind: str, group: int) -> None:
        self.kind = kind
        self.group = group
        self.started_s = time.perf_counter()
        self.posted_s = float("nan")


class CommSums(NamedTuple):
    """Seconds since the clock was made, see :class:`CommClock`."""

    communication_s: float
    exposed_s: float
    gather_s: float
    gather_exposed_s: float


class _UnderWay(NamedTuple):
    """Time in which at least one of some legs is under way."""

    legs: int = 0
    since_s: float = 0.0
    ended_s: float = 0.0

    def with_one_more(self, now_s: float) -> _UnderWay:
        return _UnderWay(self.legs + 1, self.since_s if self.legs else now_s, self.ended_s)

    def with_one_less(self, now_s: float) -> _UnderWay:
        if self.legs > 1:
            return self._replace(legs=self.legs - 1)
        return _UnderWay(0, 0.0, self.ended_s + now_s - self.since_s)

    def sum_s(self, now_s: float) -> float:
        return self.ended_s + (now_s - self.since_s if self.legs else 0.0)


class CommClock:
    """Time in which at least one leg is under way, and time in which compute waited for one; gather legs also apart.

    Host time; on CUDA streams waits do not block the host and are not counted.

    Attributes:
        trace: where to note spans; None, and then nothing is noted, while nobody traces.
    """

    def __init__(self) -> None:
        self.trace: Trace | None = None
        # Among the threads of the link. The training thread reads without it: a signal handler may interrupt it there
        # and wait for a leg, so for a thread that needs the lock.
        self._lock = threading.Lock()
        self._legs = self._gather_legs = _UnderWay()
        self._exposed_s = 0.0
        self._gather_exposed_s = 0.0

    # Legs and waits in host time.

    def leg_started(self, kind: str, group: int) -> LegTimes:
        """A leg (``scatter``, ``gather`` or ``all_reduce``) is handed to the link."""
        return LegTimes(kind, group)

    def leg_posted(self, leg: LegTimes) -> None:
        """The first bytes may leave from now on: the leg is under way."""
        leg.posted_s = time.perf_counter()
        with self._lock:
            self._legs = self._legs.with_one_more(leg.posted_s)
            if leg.kind == "gather":
                self._gather_legs = self._gather_legs.with_one_more(leg.posted_s)

    def leg_ended(self, leg: LegTimes) -> None:
        """Its result is there, or it has failed."""
        now_s = time.perf_counter()
        if leg.posted_s == leg.posted_s:  # not NaN: it did not fail before it was posted
            with self._lock:
                self._legs = self._legs.with_one_less(now_s)
                if leg.kind == "gather":
                    self._gather_legs = self._gather_legs.with_one_less(now_s)
        if self.trace is not None:
            self.trace.add(leg.kind, leg.started_s, now_s, leg.group, leg.posted_s)

    def all_reduce_started(self, group: int, device: torch.device) -> Callable[[], None]:
        """The backend's own all-reduce begins; call what is returned when it is done, on CUDA on a stream behind it."""
        if device.type == "cuda":
            begin = self.mark()
            return lambda: self.span("all_reduce", begin, group=group)
        leg = self.leg_started("all_reduce", group)
        self.leg_posted(leg)
        return lambda: self.leg_ended(leg)

    def waited(self, since_s: float, what: str, group: int = -1, *, for_gather: bool = False) -> None:
        """The training thread has waited since ``since_s`` until now; ``what`` for, such as a leg's label."""
        now_s = time.perf_counter()
        self._exposed_s += now_s - since_s
        if for_gather:
            self._gather_exposed_s += now_s - since_s
        if self.trace is not None:
            self.trace.add("wait", since_s, now_s, group, detail=what)

    def sums(self) -> CommSums:
        """Sums up to now, with what is under way."""
        legs, gather_legs, now_s = self._legs, self._gather_legs, time.perf_counter()
        return CommSums(legs.sum_s(now_s), self._exposed_s, gather_legs.sum_s(now_s), self._gather_exposed_s)

    # Anything else, and everything on CUDA: only while somebody traces.

    def mark(self, stream: torch.cuda.Stream | None = None) -> Moment | None:
        """The beginning of a span on ``stream`` (by default the current one); None while nobody traces."""
        return self.trace.now(stream) if self.trace is not None else None

    def span(
        self,
        kind: str,
        begin: Moment | None,
        stream: torch.cuda.Stream | None = None,
        *,
        group: int = -1,
        what: str = "",
    ) -> None:
        """The end of a span whose beginning :meth:`mark` gave."""
        if begin is not None and (trace := self.trace) is not None:
            trace.add(kind, begin, trace.now(stream), group, detail=what)
