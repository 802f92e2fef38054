"""Codecs in compiled loops: the same payloads, and the same is left out, bit for bit, as with operations of torch.

For slices on the host. What is encoded without a residual does not count, or is for a comparison: that is left to
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_crossover.addons.codes import kernels
from ddp_crossover.addons.codes.block_int8 import BlockInt8, codes_and_scales, in_blocks
from ddp_crossover.addons.codes.codec import Codec
from ddp_crossover.addons.codes.top_k import CHUNK_NUMEL, PLACE_BITS, Selector, TopKCodec


class CompiledInt8(BlockInt8):
    """:class:`BlockInt8` in loops of numba."""

    def encode(self, values: Tensor, residual: Tensor | None, left_out: Tensor, payload: Tensor) -> None:
        if residual is None:
            super().encode(values, residual, left_out, payload)
        else:
            kernels.encode_int8(_blocks(values), _blocks(residual), _blocks(left_out), *_code(payload))

    def encode_sum(self, total: Tensor, left_out: Tensor, payload: Tensor) -> None:
        kernels.encode_sum_int8(_blocks(total), _blocks(left_out), *_code(payload))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        kernels.decode_int8(*_code(payload), _blocks(out))

    def add(self, payload: Tensor, total: Tensor) -> None:
        kernels.add_int8(*_code(payload), _blocks(total))

    def is_finite(self, payload: Tensor) -> Tensor:
        answer = torch.empty(1, dtype=torch.bool, device="cpu")
        kernels.are_finite(_code(payload)[1], answer.numpy())
        return answer[0]


class CompiledTopK(TopKCodec):
    """:class:`TopKCodec` in loops of numba. To decode is to write zeros, mostly."""

    def encode(self, values: Tensor, residual: Tensor | None, left_out: Tensor, payload: Tensor) -> None:
        if residual is None:
            super().encode(values, residual, left_out, payload)
            return
        kernels.encode_largest(
            values.numpy(),
            residual.numpy(),
            left_out.numpy(),
            *map(Tensor.numpy, self._split(payload)),
            *self._chunks(values.numel()),
            PLACE_BITS if self._selector is Selector.CHUNKED else 0,
        )

    def add(self, payload: Tensor, total: Tensor) -> None:
        kernels.add_largest(*map(Tensor.numpy, self._split(payload)), total.numpy(), *self._chunks(total.numel()))

    def _chunks(self, numel: int) -> tuple[int, int, int]:
        """The size of a chunk, and how many elements are sent of each and of the last one."""
        chunk_numel = CHUNK_NUMEL if self._selector is Selector.CHUNKED else max(numel, 1)
        return chunk_numel, self._selected(chunk_numel), self._selected(numel % chunk_numel)


COMPILED: Mapping[type[Codec], type[Codec]] = {BlockInt8: CompiledInt8, TopKCodec: CompiledTopK}


def _blocks(flat: Tensor) -> Any:
    return in_blocks(flat).numpy()


def _code(payload: Tensor) -> tuple[Any, Any]:
    """The codes in blocks, and the scales as 16-bit integers, of which numpy has no other kind."""
    codes, scales = codes_and_scales(payload)
    return _blocks(codes), scales.view(torch.int16).numpy()
