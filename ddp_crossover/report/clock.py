"""Measures when legs and waits begin and end: always as sums, and as spans while a trace is taken."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ddp_crossover import device as gpu

if TYPE_CHECKING:
    import torch

    from ddp_crossover.report.trace import Moment, Trace


class LegTimes:
    """Host times of one leg: when it was handed to the link, and when it was posted to the network (NaN before)."""

    __slots__ = ("group", "kind", "posted_s", "started_s")

    def __init__(self, kind: str, group: int) -> None:
        self.kind = kind
        self.group = group
        self.started_s = time.perf_counter()
        self.posted_s = float("nan")

    def post(self) -> None:
        self.posted_s = time.perf_counter()


class CommSums(NamedTuple):
    """Sums in seconds since the clock was made, see :class:`CommClock`.

    Attributes:
        communication_s: at least one leg under way.
        exposed_s: the training thread waited for a leg.
        gather_s: at least one gather leg under way.
        gather_exposed_s: the training thread waited for a gather leg.
    """

    communication_s: float
    exposed_s: float
    gather_s: float
    gather_exposed_s: float

    @property
    def are_measured(self) -> bool:
        """Whether any leg was timed. None is on NCCL, whose legs do not run in host time."""
        return any(self)


NOT_MEASURED = CommSums(*[float("nan")] * 4)


# The time in which at least one leg is under way: how many are, since when one is, and the sum before. Each leg makes
# up to four, on threads whose caches are cold; a new one for each change, so that readers need no lock.
_UnderWay = tuple[int, float, float]


def _with_one_more(under_way: _UnderWay, now_s: float) -> _UnderWay:
    legs, since_s, ended_s = under_way
    return legs + 1, since_s if legs else now_s, ended_s


def _with_one_less(under_way: _UnderWay, now_s: float) -> _UnderWay:
    legs, since_s, ended_s = under_way
    return legs - 1, since_s, ended_s if legs > 1 else ended_s + now_s - since_s


def _sum_s(under_way: _UnderWay, now_s: float) -> float:
    legs, since_s, ended_s = under_way
    return ended_s + now_s - since_s if legs else ended_s


class CommClock:
    """Sums up the time in which legs are under way, and in which compute waits for them; gather legs also separately.

    All times are host time. Waits on CUDA streams do not block the host and are not counted.

    Attributes:
        trace: the trace that records spans; None while no trace is taken.
    """

    def __init__(self) -> None:
        self.trace: Trace | None = None
        # For the link's threads only. The training thread reads without the lock: if it held it, a signal handler could
        # interrupt it and wait for a leg, which needs a thread that needs the lock.
        self._lock = threading.Lock()
        self._legs: _UnderWay = (0, 0.0, 0.0)
        self._gather_legs: _UnderWay = (0, 0.0, 0.0)
        self._exposed_s = 0.0
        self._gather_exposed_s = 0.0

    @contextlib.contextmanager
    def tracing(self, trace: Trace) -> Iterator[None]:
        """Context in which spans are recorded; its end stops the trace. Raises RuntimeError inside of another one."""
        if self.trace is not None:
            raise RuntimeError("this model is being traced already: leave the other trace() first")
        self.trace = trace
        try:
            yield
        finally:
            self.trace = None
            trace.stop()

    # Legs and waits in host time.

    def leg_started(self, kind: str, group: int) -> LegTimes:
        """Note that a leg (``scatter``, ``gather`` or ``all_reduce``) is handed to the link."""
        return LegTimes(kind, group)

    def leg_posted(self, leg: LegTimes) -> None:
        """Note that the leg is under way: its first bytes may leave from now on."""
        leg.post()
        with self._lock:
            self._legs = _with_one_more(self._legs, leg.posted_s)
            if leg.kind == "gather":
                self._gather_legs = _with_one_more(self._gather_legs, leg.posted_s)

    def leg_ended(self, leg: LegTimes) -> None:
        """Note that the leg has ended: its result is available, or it has failed."""
        now_s = time.perf_counter()
        if leg.posted_s == leg.posted_s:  # not NaN: the leg was posted before it ended
            with self._lock:
                self._legs = _with_one_less(self._legs, now_s)
                if leg.kind == "gather":
                    self._gather_legs = _with_one_less(self._gather_legs, now_s)
        if self.trace is not None:
            self.trace.add(leg.kind, leg.started_s, now_s, leg.group, leg.posted_s)

    def all_reduce_started(self, group: int, device: torch.device) -> Callable[[], None]:
        """Note that the backend's own all-reduce begins; returns a function to call when it is done.

        On CUDA, call that function on a stream that waits for the all-reduce.
        """
        if gpu.has_streams(device):
            begin = self.mark()
            return lambda: self.span("all_reduce", begin, group=group)
        leg = self.leg_started("all_reduce", group)
        self.leg_posted(leg)
        return lambda: self.leg_ended(leg)

    def waited(self, since_s: float, what: str, group: int = -1, *, for_gather: bool = False) -> None:
        """Note that the training thread waited from ``since_s`` until now for ``what``, such as a leg's label."""
        now_s = time.perf_counter()
        self._exposed_s += now_s - since_s
        if for_gather:
            self._gather_exposed_s += now_s - since_s
        if self.trace is not None:
            self.trace.add("wait", since_s, now_s, group, detail=what)

    def sums(self) -> CommSums:
        """Sums up to now, including legs under way."""
        legs, gather_legs, now_s = self._legs, self._gather_legs, time.perf_counter()
        return CommSums(_sum_s(legs, now_s), self._exposed_s, _sum_s(gather_legs, now_s), self._gather_exposed_s)

    # All other spans, and all spans on CUDA, are recorded only while a trace is taken.

    def mark(self, stream: gpu.Stream | None = None) -> Moment | None:
        """The beginning of a span on ``stream`` (by default the current one); None while no trace is taken."""
        return self.trace.now(stream) if self.trace is not None else None

    def span(
        self,
        kind: str,
        begin: Moment | None,
        stream: gpu.Stream | None = None,
        *,
        group: int = -1,
        what: str = "",
    ) -> None:
        """Record a span that ends now and whose ``begin`` comes from :meth:`mark`; does nothing if that is None."""
        if begin is not None and (trace := self.trace) is not None:
            trace.add(kind, begin, trace.now(stream), group, detail=what)
