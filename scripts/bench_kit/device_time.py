"""Time on a device: sleep kernels of a known length, and how long a stream takes for what it is given.

Everything works on a CPU, too, where work is done when its call returns; so scripts can be rehearsed without a GPU.
"""

import statistics
import time
from typing import Any

import torch

_CALIBRATION_CYCLES = 20_000_000  # some 10 ms
_CALIBRATIONS = 5
Moment = Any
"""A CUDA event, or host time in seconds on a CPU."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> Moment:
    """The moment at which the current stream gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # waiting for it leaves the core to others
    event.record(torch.cuda.current_stream(device))
    return event


def between_s(begin: Moment, end: Moment) -> float:
    """Seconds from one moment to a later one; waits for it."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def wait_for(moment: Moment) -> None:
    """Wait on the host until the stream has come to a moment."""
    if not isinstance(moment, float):
        moment.synchronize()


class Sleeper:
    """Keeps the current stream busy for a time, with a kernel of one thread; on a CPU the calling thread sleeps.

    The kernel counts cycles of the multiprocessor's clock, whose frequency changes with load and temperature: calibrate
    again where the exact length matters.

    Args:
        device: the device.

    Attributes:
        cycles_per_s: as measured last; 0 on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.cycles_per_s = 0.0
        self.calibrate()

    def calibrate(self) -> None:
        """Measure the length of a cycle again, on an idle stream."""
        if self._device.type != "cuda":
            return
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # brings the clock up
        samples_s = []
        for _ in range(_CALIBRATIONS):
            begin = now(self._device)
            torch.cuda._sleep(_CALIBRATION_CYCLES)
            samples_s.append(between_s(begin, now(self._device)))
        self.cycles_per_s = _CALIBRATION_CYCLES / statistics.median(samples_s)

    def sleep(self, seconds: float) -> None:
        """Keep the current stream busy for so long."""
        if seconds <= 0:
            return
        if self._device.type == "cuda":
            torch.cuda._sleep(max(1, int(seconds * self.cycles_per_s)))
        else:
            time.sleep(seconds)
