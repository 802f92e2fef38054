"""Tensors as their elements in memory order, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_of(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The elements of a tensor in the order that it has with this dense stride; a view of it if it has that stride."""
    if tensor.stride() != stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped(flat: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The reverse: a view of contiguous elements, with this shape and dense stride."""
    return flat.as_strided(shape, stride, flat.storage_offset())
