"""CUDA streams: those on which legs run, and how other streams wait for each other's writes."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_crossover import device as gpu


class CudaStreams:
    """The streams of one link.

    Args:
        device: their device.
        legs: streams on which legs read and write fusion buffers.
    """

    def __init__(self, device: torch.device, legs: tuple[gpu.Stream, ...]) -> None:
        self.device = device
        self._legs = legs

    def current(self) -> gpu.Stream:
        """The caller's current stream on the link's device."""
        return gpu.current_stream(self.device)

    def keep_until_done(self, memory: Tensor) -> None:
        """Let the allocator keep ``memory`` until legs are done with it, even if it is dropped before."""
        # The memory is allocated at attach, possibly on another stream than the training stream.
        for stream in (*self._legs, self.current()):
            gpu.keep(memory, stream)


class StreamOrder:
    """Orders the CUDA streams on which a script may run: a reading stream waits for writes on other streams.

    An update is applied once, on the stream that is current at the first wait point that needs it, and a gradient is
    delivered once. Later uses of either are not seen. So a stream waits for what was written last when a thread makes
    it the current one, and the streams that other threads are on wait at the time of the write.

    Args:
        streams: the streams of the link; None on CPU, where there is nothing to order.
    """

    def __init__(self, streams: CudaStreams | None) -> None:
        self._streams = streams
        self._stream: gpu.Stream | None = None
        self._written: gpu.Event | None = None
        if streams is not None:
            gpu.watch_switches(self)

    def join(self) -> None:
        """Wait for the work noted by :meth:`mark`; call it before reading or writing the same data. Free on CPU."""
        if self._streams is not None:
            self._order(self._streams.current())

    def mark(self) -> None:
        """Note the current stream's work; call it after reading or writing.

        Callers have already called :meth:`join`, so one event covers earlier streams.
        """
        if self._streams is None:
            return
        self._stream = self._streams.current()
        self._written = gpu.record(self._stream)

    def publish(self) -> None:
        """Note the current stream's work as :meth:`mark` does, on what scripts may use on other streams next."""
        if self._streams is None:
            return
        self.mark()
        for stream in gpu.streams_of_threads(self._streams.device):
            # A stream that is recorded into a graph cannot wait for an event outside of it: later, when it is left.
            if stream != self._stream and not gpu.is_recorded(stream):
                self._order(stream)

    def switched_to(self, stream: gpu.Stream) -> None:
        """Make a stream wait that a script has made the current one."""
        if self._streams is None:
            return
        device = self._streams.device
        if stream.device == device and not gpu.is_capturing(device):
            self._order(stream)

    def _order(self, stream: gpu.Stream) -> None:
        if self._written is not None and stream != self._stream:
            stream.wait_event(self._written)

    def keep(self, tensor: Tensor) -> None:
        """Keep ``tensor``, maybe from another stream, until the current stream has read it, even if it is dropped."""
        if self._streams is not None:
            gpu.keep(tensor, self._streams.current())
