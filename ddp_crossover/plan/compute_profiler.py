"""Measures the compute times of a training step during training, for the planner.

One stopwatch, which stops while compute waits for communication, gives all times: when each parameter is first used,
when each gradient arrives, and when forward and backward end. On CUDA it uses events of the compute stream, because
the host's clock shows only when work was enqueued.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover import device as gpu
from ddp_crossover.moments import BeforeBackward, Follower
from ddp_crossover.plan.cost_model import ComputeProfile
from ddp_crossover.report.trace import Moment

# The first step under a plan runs with cold buffers, so it is not counted.
_WARMUP_STEPS = 1
_MEASURED_STEPS = 4


class Stopwatch:
    """Marks moments of compute. Their times are read later, because on CUDA they are still in the future.

    On CUDA a mark is an event on the stream that is current on ``device``. The device is explicit because the training
    thread's current device may be another one (``torch.cuda.set_device`` is optional); in autograd's threads it is
    this one.

    Args:
        device: device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits: list[tuple[Moment, Moment]] = []

    def now(self) -> Moment:
        """The current moment: host time or, on CUDA, an event on the current stream."""
        if not gpu.has_streams(self._device):
            return time.perf_counter()
        return gpu.record(gpu.current_stream(self._device), timed=True)

    def mark(self) -> Any:
        """Mark the current moment; the result is opaque and goes to :meth:`seconds`."""
        return self.now(), len(self._waits)

    def seconds(self, marks: Sequence[Any], *, waits: bool) -> list[float]:
        """Times of marks in seconds since the first one; ``waits`` says whether to include time spent waiting."""
        last, last_wait = marks[-1]
        if not isinstance(last, float):
            gpu.sleep_until(last)  # acceptable: called only when a plan is about to be made
        first, first_wait = marks[0]
        waited_s = [0.0]
        for begin, end in self._waits[first_wait:last_wait]:
            waited_s.append(waited_s[-1] + _between_s(begin, end))
        return [_between_s(first, at) - (0.0 if waits else waited_s[wait - first_wait]) for at, wait in marks]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager for code in which compute waits for communication; its time is not compute."""
        begin = self.now()
        try:
            yield
        finally:
            self._waits.append((begin, self.now()))


def _between_s(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else gpu.seconds_between(begin, end)


class _Step(NamedTuple):
    """Marks of one training step, which lasts until the next step's first forward."""

    begin: Any
    used: dict[int, Any]
    arrived: dict[int, Any]
    ends: dict[str, Any]  # of "forward", "backward" and "step"


class ComputeProfiler(Follower):
    """Measures a few training steps.

    Args:
        stopwatch: measures the times.
        index_of: the index of each parameter, by its id.
    """

    def __init__(self, stopwatch: Stopwatch, index_of: Mapping[int, int]) -> None:
        self._stopwatch = stopwatch
        self._index_of = index_of
        self._step: _Step | None = None
        self._steps: list[_Step] = []

    @property
    def done(self) -> bool:
        """Whether enough steps have been measured."""
        return len(self._steps) >= _WARMUP_STEPS + _MEASURED_STEPS

    def waiting(self, what: Hashable) -> contextlib.AbstractContextManager[None]:
        """Context manager for code in which compute waits for communication; its time is not compute."""
        return self._stopwatch.waiting()

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        """Note the start of a forward. The first forward after a backward begins a new step."""
        now = self._stopwatch.mark()
        if self._step is not None and "backward" in self._step.ends:
            self._step.ends["step"] = now
            self._steps.append(self._step)
            self._step = None
        if self._step is None and not self.done:
            self._step = _Step(now, {}, {}, {})

    def used(self, parameters: Iterable[int]) -> None:
        """Note that forward is about to use these parameters; only the first use counts."""
        if self._step is not None:
            now = self._stopwatch.mark()
            for index in parameters:
                self._step.used.setdefault(index, now)

    def forward_ends(self, ddp: DistributedDataParallel, output: Any, before_backward: BeforeBackward) -> None:
        """Note the end of a forward. The time after the last one counts as backward."""
        if self._step is not None:
            self._step.ends["forward"] = self._stopwatch.mark()

    def bucket_arrives(self, parameters: Sequence[Tensor], *, is_first: bool) -> None:
        """Note that the gradients of these parameters have been computed."""
        if self._step is not None:
            now = self._stopwatch.mark()
            self._step.arrived.update((self._index_of[id(parameter)], now) for parameter in parameters)

    def backward_ends(self) -> None:
        """Note that all gradients have arrived."""
        if self._step is not None:
            self._step.ends["backward"] = self._stopwatch.mark()

    def profile(self) -> ComputeProfile:
        """Medians over the measured steps, taken for each time separately."""
        rows = [self._times(step) for step in self._steps[_WARMUP_STEPS:] if "forward" in step.ends]
        medians = [max(median(column), 0.0) for column in zip(*rows, strict=True)]
        count = len(self._index_of)
        forward_s, backward_s, rest_s = medians[2 * count :]
        return ComputeProfile(
            use_s=tuple(medians[:count]),
            arrival_s=tuple(medians[count : 2 * count]),
            forward_s=forward_s,
            backward_s=backward_s,
            rest_s=rest_s,
        )

    def _times(self, step: _Step) -> list[float]:
        """Times of uses, times of arrivals, and the lengths of forward, backward and rest, all in seconds."""
        indices = range(len(self._index_of))
        # A parameter whose first use was not noticed counts as used at the beginning of the forward. One that got no
        # gradient counts as arriving at the end of backward.
        used = [step.used.get(index, step.begin) for index in indices]
        ends = [step.ends[of] for of in ("forward", "backward", "step")]
        arrived = [step.arrived.get(index, step.ends["backward"]) for index in indices]
        marks = [step.begin, *used, *arrived, *ends]
        times_s = self._stopwatch.seconds(marks, waits=False)[1:]
        forward_end_s, backward_end_s, end_s = times_s[-3:]
        return [
            *times_s[: len(used)],
            *(time_s - forward_end_s for time_s in times_s[len(used) : -3]),
            forward_end_s,
            backward_end_s - forward_end_s,
            end_s - backward_end_s,
        ]
