"""The cast of gradients into fusion buffers."""

from __future__ import annotations

import torch
from torch import Tensor

# 512 KiB of fp32: fp32 intermediates of casts from or to 16 bits stay in a core's cache.
CHUNK_NUMEL = 2**17


def scale_into(target: Tensor, source: Tensor, factor: float) -> None:
    """Set ``target`` to ``source * factor``, computed in the dtype of ``source``, rounded once; both are flat.

    With a factor of 0 ``target`` is 0, whatever is in ``source``: it may be the loss of no sample, which is NaN.
    """
    if factor == 0.0:
        target.zero_()
        return
    if target.dtype is source.dtype or not source.is_cpu:
        torch.mul(source, factor, out=target)
        return
    # In chunks: on CPU torch would make the whole product in the wider dtype and cast it in a second pass.
    for product, part in zip(target.split(CHUNK_NUMEL), source.split(CHUNK_NUMEL), strict=True):
        torch.mul(part, factor, out=product)
