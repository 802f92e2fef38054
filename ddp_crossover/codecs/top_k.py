"""The largest elements of a slice and their indices; all others are left out.

Payload: the values in fp32, then the indices: 32 bits each, or 16 bits inside of chunks of 4096 elements, from which
always equally many are taken.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ddp_crossover.codecs.codec import Codec, add_residual, all_finite
from ddp_crossover.codecs.selectors import CHUNK_NUMEL, Selector, select, selected_numel

_VALUE_BYTES = torch.float32.itemsize


class TopKCodec(Codec):
    """Sends the part ``density`` of the elements.

    Args:
        density: above 0, at most 1.
        selector: how they are found.
        device_type: where slices are, for ``Selector.AUTO``.
    """

    is_sparse = True

    def __init__(self, density: float, selector: Selector, device_type: str = "cpu") -> None:
        self.density = density
        self._selector = selector.on(device_type)
        self._index_dtype = torch.int16 if self._selector is Selector.CHUNKED else torch.int32

    def with_density(self, density: float) -> TopKCodec:
        """The same codec with another density."""
        return TopKCodec(density, self._selector)

    def payload_bytes(self, numel: int) -> int:
        return self._selected(numel) * (_VALUE_BYTES + self._index_dtype.itemsize)

    def encode(self, values: Tensor, residual: Tensor | None, left_out: Tensor, payload: Tensor) -> None:
        add_residual(values, residual, left_out)
        chosen = select(left_out, self.density, self._selector)
        sent, places = self._split(payload)
        torch.index_select(left_out, 0, chosen, out=sent)
        base = self._bases(values.numel(), values.device)
        places.copy_(chosen if base is None else chosen - base)
        left_out.index_fill_(0, chosen, 0.0)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.zero_()
        sent, _ = self._split(payload)
        out.index_copy_(0, self._indices(payload, out), sent)

    def add(self, payload: Tensor, total: Tensor) -> None:
        # Indices occur once, so that the order of additions does not matter.
        sent, _ = self._split(payload)
        total.index_add_(0, self._indices(payload, total), sent)

    def clear(self, payload: Tensor, state: Tensor) -> None:
        state.index_fill_(0, self._indices(payload, state), 0.0)

    def is_finite(self, payload: Tensor) -> Tensor:
        return all_finite(self._split(payload)[0])

    def _selected(self, numel: int) -> int:
        return selected_numel(numel, self.density, self._selector)

    def _split(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        count = payload.numel() // (_VALUE_BYTES + self._index_dtype.itemsize)
        values, places = payload.split([count * _VALUE_BYTES, count * self._index_dtype.itemsize])
        return values.view(torch.float32), places.view(self._index_dtype)

    def _indices(self, payload: Tensor, like: Tensor) -> Tensor:
        places = self._split(payload)[1].long()
        base = self._bases(like.numel(), like.device)
        return places if base is None else places + base

    def _bases(self, numel: int, device: torch.device) -> Tensor | None:
        """First element of the chunk of each selected one; None if indices are those of the slice."""
        if self._selector is not Selector.CHUNKED:
            return None
        return _chunk_starts(numel, self._selected(min(numel, CHUNK_NUMEL)), self._selected(numel), device)


@functools.lru_cache(maxsize=256)
def _chunk_starts(numel: int, of_each: int, selected: int, device: torch.device) -> Tensor:
    chunks = -(-numel // CHUNK_NUMEL)
    starts = torch.arange(chunks, device=device) * CHUNK_NUMEL
    return starts.repeat_interleave(of_each)[:selected]
