"""A trace of one rank: what it did and when.

Whoever records appends a tuple to a bounded list, and nothing else happens until the trace is read. A moment is
host time, or on a GPU a CUDA event, which becomes host time then (see :class:`DeviceClock`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path

import torch

from ddp_crossover.tracing import perfetto
from ddp_crossover.tracing.spans import Figures, Span, figures

MAX_SPANS = 200_000
# What a file says of a trace besides its spans.
_ABOUT = ("rank", "title", "wall_offset_s", "began_s", "ended_s")

Moment = float | torch.cuda.Event


class DeviceClock:
    """Turns CUDA events into host time: one event and one look at the host's clock, taken together.

    CUDA counts the time between events in fp32 milliseconds, so that after a minute it resolves 4 us.

    Args:
        device: the CUDA device of all events.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Else the event would be as late as the work that is queued before it.
        torch.cuda.synchronize(device)
        self._reference = self.now()
        self._reference_s = time.perf_counter()

    def now(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """An event on ``stream``, by default the current one."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def host_s(self, event: torch.cuda.Event) -> float:
        """When the event happened. Waits for it."""
        event.synchronize()
        return self._reference_s + float(self._reference.elapsed_time(event)) * 1e-3


class Trace:
    """What one rank did, as :meth:`DearState.trace` records it.

    Args:
        rank: of this process.
        title: what was traced, for pictures.
        device: of the gradients; on CUDA moments are events.
        max_spans: only the latest ones are kept, so that a trace that was forgotten does not fill the memory.

    Attributes:
        wall_offset_s: what to add to host times to get seconds since 1970. It brings ranks to a common axis, as
            well as their machines' clocks agree.
        began_s: host time at which recording began.
        ended_s: host time at which it ended; infinite before.

    Example::

        with state.trace() as trace:
            train(steps=20)
        print(trace.exposed_s(), trace.steps()[-1])
        trace.save("trace-rank0.json")
    """

    def __init__(
        self, rank: int = 0, title: str = "", device: torch.device | None = None, max_spans: int = MAX_SPANS
    ) -> None:
        self.rank = rank
        self.title = title
        self.wall_offset_s = time.time() - time.perf_counter()
        self._device_clock = DeviceClock(device) if device is not None and device.type == "cuda" else None
        self._recorded: deque[tuple[str, Moment, Moment, int, float, str]] = deque(maxlen=max_spans)
        self.began_s = time.perf_counter()
        self.ended_s = float("inf")

    # Recording.

    def now(self, stream: torch.cuda.Stream | None = None) -> Moment:
        """This moment; on CUDA, when ``stream`` (by default the current one) gets here."""
        return time.perf_counter() if self._device_clock is None else self._device_clock.now(stream)

    def add(
        self,
        kind: str,
        begin: Moment,
        end: Moment,
        group: int = -1,
        posted_s: float = float("nan"),
        detail: str = "",
    ) -> None:
        """Note one span, in the order of :class:`Span`. Any thread may call it."""
        self._recorded.append((kind, begin, end, group, posted_s, detail))

    def stop(self) -> None:
        """Nothing comes after this. On CUDA it waits for the current stream."""
        self.ended_s = self._host_s(self.now())

    # Reading.

    def spans(self, *kinds: str) -> list[Span]:
        """All spans, or those of some kinds, by begin. On CUDA it waits for the work that is traced."""
        found = (
            Span(kind, self._host_s(begin), self._host_s(end), group, posted_s, detail)
            for kind, begin, end, group, posted_s, detail in list(self._recorded)
            if not kinds or kind in kinds
        )
        return sorted(found, key=lambda span: span.interval)

    def _host_s(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        assert self._device_clock is not None
        return self._device_clock.host_s(moment)

    def exposed_s(self) -> float:
        """Time in which at least one leg was under way and nothing was computed."""
        return self.figures().exposed_s

    def figures(self) -> Figures:
        """Sums over all that was traced."""
        # A leg may have begun before there was anybody to note the compute that hid it.
        return figures(self.spans(), [(self.began_s, self._last_s())])[0]

    def steps(self) -> list[Figures]:
        """Sums for each step that is complete: the last one ends only when another begins."""
        spans = self.spans()
        return figures(spans, [span.interval for span in spans if span.kind == "step"])

    def _last_s(self) -> float:
        return time.perf_counter() if math.isinf(self.ended_s) else self.ended_s

    # Files.

    def save(self, path: str | Path) -> None:
        """Write trace-event JSON: open it in ui.perfetto.dev, read it with :meth:`load`, draw it with ``timeline``.

        A process stands for the rank, a thread for a lane. Times are microseconds since 1970.
        """
        about = {name: getattr(self, name) for name in _ABOUT} | {"ended_s": self._last_s()}
        perfetto.write(Path(path), about, self.spans())

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what :meth:`save` wrote. Times come back to within a microsecond.

        Raises:
            OSError: if there is no such file.
            ValueError: if something else wrote it.
        """
        about, spans = perfetto.read(Path(path))
        trace = cls(max_spans=len(spans))
        for name in _ABOUT:
            setattr(trace, name, about[name])
        for span in spans:
            trace.add(*span)
        return trace
