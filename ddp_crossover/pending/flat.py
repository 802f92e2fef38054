"""Tensors as their elements in memory order, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD_BYTES = 8


def flat_of(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The elements of a tensor in the order that it has with this dense stride; a view of it if it has that stride."""
    if tensor.stride() != stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped(flat: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The reverse: a view of contiguous elements, with this shape and dense stride."""
    return flat.as_strided(shape, stride, flat.storage_offset())


def sum_of_bits(tensor: Tensor) -> int:
    """A number that is the same for the same bits. Reads eight bytes at a time, which costs less than a float sum."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % _WORD_BYTES:
        raw = raw.clone()
    words, rest = raw.numel() // _WORD_BYTES, raw.numel() % _WORD_BYTES
    total = int(raw[: words * _WORD_BYTES].view(torch.int64).sum()) if words else 0
    return total + int.from_bytes(raw[-rest:].tolist()) if rest else total


def table_of(rows: Sequence[Sequence[Tensor]], filler: Tensor) -> Tensor:
    """Tensors of the filler's shape, dtype and device as one of shape ``(rows, longest row, *shape)``.

    Short rows are filled up. Nothing is indexed: the host would wait while the indices are copied to a GPU.
    """
    width = max(1, *map(len, rows)) if rows else 1
    cells = [cell for row in rows for cell in (*row, *[filler] * (width - len(row)))]
    table = torch.stack(cells) if cells else filler.new_empty(0, *filler.shape)
    return table.view(len(rows), width, *filler.shape)
