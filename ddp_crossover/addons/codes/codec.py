"""The interface of a codec: writes a slice of a fusion buffer into fewer bytes, and reads it again."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

# 1 MiB of fp32: what a codec computes in between mostly stays in a core's cache, and each operation is worth its call.
CHUNK_NUMEL = 2**18


class Codec(ABC):
    """Writes flat fp32 slices as payloads, flat uint8 tensors whose size depends on the slice's size only.

    What a payload decodes to, plus what :meth:`encode` has left out, is exactly what was encoded, in fp32. Values that
    are not finite decode to some that are not, so that loss scalers see them.

    Attributes:
        align_numel: slices are multiples of this many elements, and gradients in them begin at such multiples.
        is_sparse: whether most elements are left out, so that sums of several payloads have more bytes than one.
    """

    align_numel: int = 1
    is_sparse: bool = False

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Bytes of the payload of a slice of ``numel`` elements."""

    @abstractmethod
    def encode(self, values: Tensor, residual: Tensor | None, left_out: Tensor, payload: Tensor) -> None:
        """Write ``values + residual`` into ``payload``.

        Args:
            values: the slice.
            residual: what earlier payloads have left out; None: nothing.
            left_out: gets what this payload leaves out; other memory than ``residual``, perhaps that of ``values``.
            payload: gets the code.
        """

    def encode_sum(self, total: Tensor, left_out: Tensor, payload: Tensor) -> None:
        """Write ``total`` into ``payload``, and replace it by what the payload stands for.

        Args:
            total: the slice.
            left_out: gets what the payload leaves out; other memory.
            payload: gets the code.
        """
        self.encode(total, None, left_out, payload)
        self.decode(payload, total)

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write what ``payload`` stands for into ``out``."""

    @abstractmethod
    def add(self, payload: Tensor, total: Tensor) -> None:
        """Add what ``payload`` stands for to ``total``, rounded once."""

    @abstractmethod
    def is_finite(self, payload: Tensor) -> Tensor:
        """Whether everything decodes to finite values, as a 0-dim tensor."""


def add_residual(values: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """Set ``out`` to ``values + residual``."""
    if residual is not None:
        torch.add(values, residual, out=out)
    elif out.data_ptr() != values.data_ptr():
        out.copy_(values)


def all_finite(values: Tensor) -> Tensor:
    """Whether all values are finite, as a 0-dim tensor. On CPU it reads them once, unless their sum overflows."""
    if values.is_cpu and (total := values.sum().isfinite()):
        return total
    return values.isfinite().all()


def chunk_numel(values: Tensor) -> int:
    """How many elements to compute at once: on a GPU, where each operation has to be launched, all of them."""
    return CHUNK_NUMEL if values.is_cpu else max(values.numel(), 1)
