"""What a gradient is on the wire: its dtype there, and how it is cast into it."""

from __future__ import annotations

import torch
from torch import Tensor

WIRE_DTYPES = (torch.bfloat16, torch.float16)
# 512 KiB of fp32: what has to be made in fp32 on the way from or to 16 bits stays in a core's cache.
CHUNK_NUMEL = 2**17


def travels_as(dtype: torch.dtype, wire_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a gradient of ``dtype`` is sent: ``wire_dtype`` if that is narrower, else its own."""
    return wire_dtype if wire_dtype is not None and wire_dtype.itemsize < dtype.itemsize else dtype


def scale_into(target: Tensor, source: Tensor, factor: float) -> None:
    """``target`` becomes ``source * factor``, computed in the dtype of ``source`` and then rounded once; both flat."""
    if target.dtype is source.dtype or not source.is_cpu:
        torch.mul(source, factor, out=target)
        return
    # On CPU torch makes the whole product in the wider dtype first and casts it in a second pass.
    for product, part in zip(target.split(CHUNK_NUMEL), source.split(CHUNK_NUMEL), strict=True):
        torch.mul(part, factor, out=product)
