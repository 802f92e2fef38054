"""Which gradients lie in memory that a script keeps: their tensor object, a view of it, a buffer around it.

At the end of backward plain DDP leaves the reduced gradient in that memory, and nothing tells when a script reads it.
So it cannot wait. Found by counting references: what C++ and DDP hold of a gradient that nobody keeps is known.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_crossover.gradients import PendingGrad
from ddp_crossover.torch_internals import references_to_bucket_view, storage_use_count


class KeptGradients:
    """Counts references.

    Attributes:
        bucket_sizes: how many gradients are views of each of DDP's buckets, by address of its storage.
    """

    def __init__(self) -> None:
        self.bucket_sizes: dict[int, int] = {}
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
        if isinstance(grad, PendingGrad):
            memory, alone = grad.own_value(), self._alone_in_pending
        else:
            memory, alone = grad, self._alone
        storage = memory.untyped_storage()
        of_storage = storage_use_count(storage) + sys.getrefcount(storage)
        return of_storage + memory._use_count() + sys.getrefcount(memory) - alone

    def is_in_bucket(self, memory: Tensor) -> bool:
        """Whether it is a part of one of DDP's buckets."""
        return memory.untyped_storage()._cdata in self.bucket_sizes

    def kept(self, parameters: Sequence[Parameter]) -> list[bool]:
        """Whether somebody keeps its gradient, for each of these: all that have an excess of references."""
        in_storage = Counter(_storage_of(parameter.grad) for parameter in parameters)
        return [self._is_kept(parameter, in_storage) for parameter in parameters]

    def _is_kept(self, parameter: Parameter, in_storage: Mapping[int, int]) -> bool:
        storage = _storage_of(parameter.grad)
        # Several gradients may be parts of one tensor, as those of weights that forward concatenates.
        usual = in_storage[storage] - 1
        if (size := self.bucket_sizes.get(storage)) is not None:
            usual = references_to_bucket_view(size)
        grad = parameter.grad
        assert grad is not None
        return self.excess(grad) > usual


def _storage_of(grad: Tensor | None) -> int:
    assert grad is not None
    memory = grad.own_value() if isinstance(grad, PendingGrad) else grad
    address: int = memory.untyped_storage()._cdata
    return address
