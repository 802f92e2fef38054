"""Refuses a change of a parameter's memory format after attach, which DDP's buckets do not follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter


class MemoryFormats:
    """The strides of all parameters at attach.

    Args:
        named: names and parameters that DDP manages.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self._named = named
        self._parameters = [parameter for _, parameter in named]
        self._strides = self._strides_now()

    def refuse_changes(self) -> None:
        """Raise RuntimeError if the memory format of a parameter has changed since attach.

        DDP's buckets keep the old one, so even plain DDP gets most of such gradients wrong.
        """
        if (strides := self._strides_now()) == self._strides:
            return
        for (name, parameter), before, now in zip(self._named, self._strides, strides, strict=True):
            if any(size > 1 and a != b for size, a, b in zip(parameter.shape, before, now, strict=True)):
                raise RuntimeError(
                    f"the memory layout of {name} has changed since attach (memory_format=torch.channels_last and the "
                    "like), and DDP's buckets have not: change it before building DistributedDataParallel, or call "
                    "state.detach(), build a new DistributedDataParallel around ddp.module, and attach to that"
                )
        self._strides = strides

    def drop_references(self) -> None:
        """Drop the parameters."""
        self._named = ()
        self._parameters.clear()

    def _strides_now(self) -> list[tuple[int, ...]]:
        with torch._C.DisableTorchFunctionSubclass():  # strides need no value, so do not touch the parameters
            return list(map(Tensor.stride, self._parameters))
