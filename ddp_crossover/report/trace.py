"""A trace of one rank: which spans of work it did, and when.

Recording a span only appends a tuple to a bounded deque; everything else happens when the trace is read. A moment is
host time or, on a GPU, a CUDA event, which is converted to host time on reading (see :class:`DeviceClock`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from typing import TypeAlias

import torch

from ddp_crossover import device as gpu
from ddp_crossover.report import perfetto
from ddp_crossover.report.spans import Figures, Span, figures

MAX_SPANS = 200_000
# Attributes that a file stores besides the spans.
_ABOUT = ("rank", "title", "wall_offset_s", "began_s", "ended_s")

Moment: TypeAlias = "float | gpu.Event"


class DeviceClock:
    """Converts CUDA events to host time, by a reference event and the host time at which it happened.

    CUDA reports the time between events in fp32 milliseconds, so the resolution after one minute is 4 us.

    Args:
        device: the CUDA device of all events.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Otherwise the event would happen only after the work that is queued before it.
        gpu.synchronize(device)
        self._reference = self.now()
        self._reference_s = time.perf_counter()

    def now(self, stream: gpu.Stream | None = None) -> gpu.Event:
        """Record an event on ``stream`` (by default the current one)."""
        return gpu.record(stream or gpu.current_stream(self.device), timed=True)

    def host_s(self, event: gpu.Event) -> float:
        """Host time in seconds at which the event happened. Waits for the event."""
        gpu.sleep_until(event)
        return self._reference_s + gpu.seconds_between(self._reference, event)


class Trace:
    """The spans of one rank, as :meth:`DearState.trace` records them.

    Args:
        rank: rank of this process.
        title: title for pictures.
        device: device of the gradients; on CUDA, moments are events.
        max_spans: maximum number of spans; older ones are dropped, so that a forgotten trace does not fill the memory.

    Attributes:
        wall_offset_s: seconds to add to host times to get seconds since 1970. It puts all ranks on a common axis, as
            accurately as their machines' clocks agree.
        began_s: host time at which recording began.
        ended_s: host time at which recording ended; infinite while it goes on.

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
        self._device_clock = DeviceClock(device) if device is not None and gpu.has_streams(device) else None
        self._recorded: deque[tuple[str, Moment, Moment, int, float, str]] = deque(maxlen=max_spans)
        self.began_s = time.perf_counter()
        self.ended_s = float("inf")

    # Recording.

    def now(self, stream: gpu.Stream | None = None) -> Moment:
        """The current moment; on CUDA, the moment at which ``stream`` (by default the current one) gets here."""
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
        """Record one span; the arguments are those of :class:`Span`. Any thread may call it."""
        self._recorded.append((kind, begin, end, group, posted_s, detail))

    def stop(self) -> None:
        """End the recording. On CUDA this waits for the current stream."""
        self.ended_s = self._host_s(self.now())

    # Reading.

    def spans(self, *kinds: str) -> list[Span]:
        """All spans, or those of ``kinds``, sorted by begin. On CUDA this waits for the traced work."""
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
        """Seconds in which at least one leg was under way and nothing was computed."""
        return self.figures().exposed_s

    def figures(self) -> Figures:
        """Sums over the whole trace."""
        # Not before began_s: a leg may have begun earlier, and the compute that hid it then was not recorded.
        return figures(self.spans(), [(self.began_s, self._last_s())])[0]

    def steps(self) -> list[Figures]:
        """Sums for each complete step. The last step is complete only when another one begins."""
        spans = self.spans()
        return figures(spans, [span.interval for span in spans if span.kind == "step"])

    def _last_s(self) -> float:
        return time.perf_counter() if math.isinf(self.ended_s) else self.ended_s

    # Files.

    def save(self, path: str | Path) -> None:
        """Write trace-event JSON: open it in ui.perfetto.dev, read it with :meth:`load`, draw it with ``timeline``.

        The rank is shown as a process, each lane as a thread. Times are in microseconds since 1970.
        """
        about = {name: getattr(self, name) for name in _ABOUT} | {"ended_s": self._last_s()}
        perfetto.write(Path(path), about, self.spans())

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file written by :meth:`save`. Times are exact to within a microsecond.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if the file was not written by this version of ddp_crossover.
        """
        about, spans = perfetto.read(Path(path))
        trace = cls(max_spans=len(spans))
        for name in _ABOUT:
            setattr(trace, name, about[name])
        for span in spans:
            trace.add(*span)
        return trace
