"""What a trace is made of, and what follows from it by arithmetic of intervals. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ddp_crossover.tracing.intervals import Interval, clip, difference, total, union

LEG_KINDS = ("scatter", "gather", "all_reduce")
COMPUTE_KINDS = ("forward", "backward", "update")
WAIT_KINDS = ("wait", "lease_wait")
LEASE_KINDS = ("held", "gap", "lease_wait")
KINDS = ("step", *COMPUTE_KINDS, "wait", *LEG_KINDS, *LEASE_KINDS)


class Span(NamedTuple):
    """One thing that was done.

    Attributes:
        kind: ``step``, ``forward``, ``backward``, ``update``, ``wait``, ``scatter``, ``gather`` or ``all_reduce``. A
            step goes from the first forward after an ``optimizer.step()`` to the next such forward. With a lease also
            ``held``, ``gap`` (a wait in which another job had its turn) and ``lease_wait``.
        begin_s: host time (``time.perf_counter``). A leg begins when it is handed to the link.
        end_s: likewise.
        group: fusion group of a leg (with plain all-reduce the bucket), or of the leg that is waited for; else -1.
        posted_s: when a leg was given to the network; NaN where that is not known, or for what is no leg.
        detail: for a wait, what is waited for; for the lease, the job.
    """

    kind: str
    begin_s: float
    end_s: float
    group: int = -1
    posted_s: float = float("nan")
    detail: str = ""

    @property
    def interval(self) -> Interval:
        """Begin and end."""
        return self.begin_s, self.end_s

    @property
    def under_way(self) -> Interval:
        """A leg from when it was posted, where that is known: before, it waited for its turn and used no link."""
        return (self.posted_s if self.posted_s == self.posted_s else self.begin_s, self.end_s)


class Figures(NamedTuple):
    """Where the time of one step, or of a whole trace, went; all in seconds.

    Attributes:
        begin_s: host time (``time.perf_counter``).
        end_s: likewise.
        compute_s: forward, backward and updates, without waits.
        communication_s: at least one leg under way.
        exposed_s: at least one leg under way and no compute.
        wait_s: the training thread waited for a leg.
    """

    begin_s: float
    end_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    wait_s: float

    @property
    def duration_s(self) -> float:
        """From begin to end."""
        return self.end_s - self.begin_s


def exposed(spans: list[Span]) -> list[Interval]:
    """When at least one leg was under way and nothing was computed."""
    return difference(when(spans, LEG_KINDS), computing(spans))


def computing(spans: list[Span]) -> list[Interval]:
    """When forward, backward or an update ran and did not wait."""
    return difference(when(spans, COMPUTE_KINDS), when(spans, WAIT_KINDS))


def when(spans: list[Span], kinds: Iterable[str]) -> list[Interval]:
    """When something of these kinds was going on, as a disjoint list."""
    return union(span.under_way for span in spans if span.kind in kinds)


def figures(spans: list[Span], windows: list[Interval]) -> list[Figures]:
    """The figures of each window of time."""
    parts = (computing(spans), when(spans, LEG_KINDS), exposed(spans), when(spans, ("wait",)))
    return [Figures(*window, *(total(clip(part, window)) for part in parts)) for window in windows]
