"""Which CUDA stream may read what another one has written."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_crossover.collectives.link import Link


class StreamOrder:
    """Orders the CUDA streams that a forward may run on: who reads waits for what another stream has written.

    An update is applied once, at the first wait point that needs it, on the stream that is current there. A module on
    another stream, which uses the same parameters or others of the same fusion group, finds nothing left to do.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stream: torch.cuda.Stream | None = None
        self._written: torch.cuda.Event | None = None

    def join(self) -> None:
        """Before reading or writing what :meth:`mark` was called for. Costs nothing on CPU."""
        if self._stream is None or self._written is None:
            return
        stream = self._link.current_stream()
        if stream is not None and stream != self._stream:
            stream.wait_event(self._written)

    def mark(self) -> None:
        """After reading or writing. Whoever calls it has joined before, so one event stands for all streams."""
        self._stream = self._link.current_stream()
        if self._stream is not None:
            self._written = self._written or torch.cuda.Event()
            self._written.record(self._stream)

    def keep(self, tensor: Tensor) -> None:
        """The stream that is current reads ``tensor``, which may have been made on another and be dropped soon."""
        if (stream := self._link.current_stream()) is not None:
            tensor.record_stream(stream)
