"""Measures the compute times of a training step in training, for the planner.

Everything is read from one stopwatch that stands still while compute waits for communication: when each parameter is
first used, when each gradient arrives, and where forward and backward end. On CUDA it runs on events of the compute
stream, because the host's clock shows only when work was enqueued.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from ddp_crossover.planning.cost_model import ComputeProfile
from ddp_crossover.tracing.trace import Moment

# The first step under a plan runs with cold buffers.
_WARMUP_STEPS = 1
_MEASURED_STEPS = 4


class Stopwatch:
    """Marks moments of compute. Their times are read later, because on CUDA they are in the future.

    There it is for the stream that is current on ``device`` at each mark. The thread's own may be another, since nobody
    has to call ``torch.cuda.set_device``; that of autograd's is this one.

    Args:
        device: where compute is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits: list[tuple[Moment, Moment]] = []

    def now(self) -> Moment:
        """This moment of the host or, on CUDA, of the stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark(self) -> Any:
        """This moment, and what has been waited for until then; opaque."""
        return self.now(), len(self._waits)

    def seconds(self, marks: Sequence[Any], *, waits: bool) -> list[float]:
        """Times of marks in seconds, from the first of them; with or without the time spent waiting."""
        last, last_wait = marks[-1]
        if not isinstance(last, float):
            last.synchronize()  # only when a plan is about to be made
        first, first_wait = marks[0]
        waited_s = [0.0]
        for begin, end in self._waits[first_wait:last_wait]:
            waited_s.append(waited_s[-1] + _between_s(begin, end))
        return [_between_s(first, at) - (0.0 if waits else waited_s[wait - first_wait]) for at, wait in marks]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Compute waits for communication within."""
        begin = self.now()
        try:
            yield
        finally:
            self._waits.append((begin, self.now()))


def _between_s(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3


class _Step:
    """Marks of one training step, from its first forward to the next step's."""

    def __init__(self, begin: Any) -> None:
        self.begin = begin
        self.used: dict[int, Any] = {}
        self.arrived: dict[int, Any] = {}
        self.forward_end: Any = None
        self.backward_end: Any = None
        self.end: Any = None


class ComputeProfiler:
    """Follows a few training steps.

    Args:
        stopwatch: what to measure with.
        parameters: number of parameters.
    """

    def __init__(self, stopwatch: Stopwatch, parameters: int) -> None:
        self._stopwatch = stopwatch
        self._parameters = parameters
        self._step: _Step | None = None
        self._steps: list[_Step] = []

    @property
    def done(self) -> bool:
        """Whether enough steps have been seen."""
        return len(self._steps) >= _WARMUP_STEPS + _MEASURED_STEPS

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Compute waits for communication within."""
        return self._stopwatch.waiting()

    def forward_begins(self) -> None:
        """A forward of the model. The first one after a backward begins the step."""
        now = self._stopwatch.mark()
        if self._step is not None and self._step.backward_end is not None:
            self._step.end = now
            self._steps.append(self._step)
            self._step = None
        if self._step is None and not self.done:
            self._step = _Step(now)

    def used(self, parameters: Iterable[int]) -> None:
        """A module is about to use these parameters."""
        if self._step is not None:
            now = self._stopwatch.mark()
            for index in parameters:
                self._step.used.setdefault(index, now)

    def forward_ends(self) -> None:
        """A forward of the model. What follows the last one counts as backward."""
        if self._step is not None:
            self._step.forward_end = self._stopwatch.mark()

    def arrived(self, parameters: Iterable[int]) -> None:
        """The gradients of these parameters have been computed."""
        if self._step is not None:
            now = self._stopwatch.mark()
            self._step.arrived.update((index, now) for index in parameters)

    def backward_ends(self) -> None:
        """All gradients have arrived."""
        if self._step is not None:
            self._step.backward_end = self._stopwatch.mark()

    def profile(self) -> ComputeProfile:
        """Medians over the steps seen, each parameter's for itself."""
        rows = [self._times(step) for step in self._steps[_WARMUP_STEPS:] if step.forward_end is not None]
        medians = [max(median(column), 0.0) for column in zip(*rows, strict=True)]
        count = self._parameters
        forward_s, backward_s, rest_s = medians[2 * count :]
        return ComputeProfile(
            use_s=tuple(medians[:count]),
            arrival_s=tuple(medians[count : 2 * count]),
            forward_s=forward_s,
            backward_s=backward_s,
            rest_s=rest_s,
        )

    def _times(self, step: _Step) -> list[float]:
        """Uses, arrivals, and the lengths of forward, backward and rest."""
        indices = range(self._parameters)
        # Used in a way that no module shows: at the beginning. No gradient: it is not waited for.
        used = [step.used.get(index, step.begin) for index in indices]
        arrived = [step.arrived.get(index, step.backward_end) for index in indices]
        marks = [step.begin, *used, *arrived, step.forward_end, step.backward_end, step.end]
        times_s = self._stopwatch.seconds(marks, waits=False)[1:]
        forward_end_s, backward_end_s, end_s = times_s[-3:]
        return [
            *times_s[: len(used)],
            *(time_s - forward_end_s for time_s in times_s[len(used) : -3]),
            forward_end_s,
            backward_end_s - forward_end_s,
            end_s - backward_end_s,
        ]
