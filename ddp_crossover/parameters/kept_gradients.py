"""Which gradients lie in memory that a script keeps: their tensor object, a view of it, a buffer around it.

At the end of backward plain DDP leaves the reduced gradient in that memory, and nothing tells when a script reads it.
So it cannot wait. Found by counting references: what C++ and DDP hold of a gradient that nobody keeps is known.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_crossover.parameters.pending_gradient import PendingGrad
from ddp_crossover.torch_internals import references_to_bucket_view, references_to_memory


class KeptGradients:
    """Counts references."""

    def __init__(self) -> None:
        self._of_ddp: dict[int, int] = {}  # references that DDP has, by address of a bucket's storage
        # References to gradients that nobody keeps, as this version of torch counts them.
        self._alone = self._alone_in_pending = 0
        parameter = Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        grad = parameter.grad
        self._alone = self.excess(grad)
        pending = PendingGrad(parameter, parameter.dtype, threading.RLock())
        pending.arm(lambda memory: memory, torch.zeros(1))
        self._alone_in_pending = self.excess(pending)

    def excess(self, grad: Tensor) -> int:
        """How many references to this memory there are besides those that a gradient always has.

        Args:
            grad: what ``param.grad`` is; it must have exactly one name of the caller's.
        """
        if type(grad) is PendingGrad:
            excess = references_to_memory(grad.own_value()) - self._alone_in_pending
        else:
            excess = references_to_memory(grad) - self._alone
        return excess and excess - self._of_ddp.get(_storage_of(grad), 0)

    def forget_buckets(self) -> None:
        """Gradients are going to be views of others."""
        self._of_ddp.clear()

    def note_bucket(self, buffer: Tensor, gradients: int) -> None:
        """So many gradients may be views of this bucket."""
        self._of_ddp[_storage_of(buffer)] = references_to_bucket_view(gradients)

    def is_in_bucket(self, memory: Tensor) -> bool:
        """Whether it is a part of one of DDP's buckets."""
        return _storage_of(memory) in self._of_ddp

    def kept(self, parameters: Sequence[Parameter]) -> list[bool]:
        """Whether somebody keeps its gradient, for each of these: all that have an excess of references."""
        # Several gradients may be parts of one tensor, as those of weights that forward concatenates.
        in_storage = Counter(_storage_of(parameter.grad) for parameter in parameters)
        return [self._is_kept(parameter, in_storage) for parameter in parameters]

    def _is_kept(self, parameter: Parameter, in_storage: Mapping[int, int]) -> bool:
        storage = _storage_of(parameter.grad)
        others = 0 if storage in self._of_ddp else in_storage[storage] - 1
        grad = parameter.grad
        assert grad is not None
        return self.excess(grad) > others


def _storage_of(grad: Tensor | None) -> int:
    assert grad is not None
    memory = grad.own_value() if isinstance(grad, PendingGrad) else grad
    address: int = memory.untyped_storage()._cdata
    return address
