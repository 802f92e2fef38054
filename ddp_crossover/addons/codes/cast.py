"""Elements rounded to a narrower floating-point type."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_crossover.addons.codes.codec import Codec, add_residual, all_finite, chunk_numel


class Cast(Codec):
    """Sends each element as ``dtype``: a code, with error feedback, unlike the cast of ``Wire.cast_to``.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def payload_bytes(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def encode(self, values: Tensor, residual: Tensor | None, left_out: Tensor, payload: Tensor) -> None:
        code = payload.view(self._dtype)
        step = chunk_numel(values)
        for low in range(0, values.numel(), step):
            part = slice(low, low + step)
            rest = left_out[part]
            add_residual(values[part], None if residual is None else residual[part], rest)
            code[part] = rest
            rest.sub_(code[part])

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(self._dtype))

    def add(self, payload: Tensor, total: Tensor) -> None:
        total.add_(payload.view(self._dtype))

    def is_finite(self, payload: Tensor) -> Tensor:
        return all_finite(payload.view(self._dtype))
