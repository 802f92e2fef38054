"""Makes CUDA streams wait for each other's writes."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_crossover.collectives.link import Link


class StreamOrder:
    """Orders the CUDA streams on which a forward may run: a reading stream waits for writes on other streams.

    An update is applied once, on the stream that is current at the first wait point that needs it. If a module on
    another stream then uses parameters of the same fusion group, no update is left to apply, so its stream has to wait
    for the earlier one.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stream: torch.cuda.Stream | None = None
        self._written: torch.cuda.Event | None = None

    def join(self) -> None:
        """Wait for the work noted by :meth:`mark`; call it before reading or writing the same data. Free on CPU."""
        if self._stream is None or self._written is None:
            return
        stream = self._link.current_stream()
        if stream is not None and stream != self._stream:
            stream.wait_event(self._written)

    def mark(self) -> None:
        """Note the current stream's work; call it after reading or writing.

        Callers have already called :meth:`join`, so one event covers earlier streams.
        """
        self._stream = self._link.current_stream()
        if self._stream is not None:
            self._written = self._written or torch.cuda.Event()
            self._written.record(self._stream)

    def keep(self, tensor: Tensor) -> None:
        """Keep ``tensor``, maybe from another stream, until the current stream has read it, even if it is dropped."""
        if (stream := self._link.current_stream()) is not None:
            tensor.record_stream(stream)
