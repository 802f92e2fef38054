"""Finds gradients whose memory a script keeps: by their tensor object, a view of it, or a buffer around it.

At the end of backward plain DDP leaves the reduced gradient in that memory, and a later read by the script cannot be
observed. So such a gradient must be delivered at the end of backward. They are found by counting references: C++ and
DDP hold a known number of them to a gradient that no script keeps.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_crossover.pending.pending_gradient import PendingGrad
from ddp_crossover.torch_internals.ddp import references_to_bucket_view
from ddp_crossover.torch_internals.memory import references_to_memory


class KeptGradients:
    """Finds kept gradients by counting references to their memory."""

    def __init__(self) -> None:
        self._of_ddp: dict[int, int] = {}  # DDP's references, by address of a bucket's storage
        # References to a gradient that no script keeps. Measured, because they differ between versions of torch.
        self._alone = self._alone_in_pending = 0
        parameter = Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = torch.zeros(1, device="cpu")
        grad = parameter.grad
        self._alone = self.excess(grad)
        pending = PendingGrad(parameter.shape, parameter.stride(), parameter.dtype, parameter.device, threading.RLock())
        pending.arm(lambda memory: memory, torch.zeros(1, device="cpu"), lambda memory: False)
        self._alone_in_pending = self.excess(pending)

    def excess(self, grad: Tensor) -> int:
        """Number of references to this memory beyond those that every gradient has.

        Args:
            grad: the tensor in ``param.grad``; the caller must hold exactly one reference to it.
        """
        if type(grad) is PendingGrad:
            excess = references_to_memory(grad.own_value()) - self._alone_in_pending
        else:
            excess = references_to_memory(grad) - self._alone
        return excess and excess - self._of_ddp.get(_storage_of(grad), 0)

    def forget_buckets(self) -> None:
        """Forget DDP's buckets at the beginning of backward, which may use other ones."""
        self._of_ddp.clear()

    def note_bucket(self, buffer: Tensor, gradients: int, own: int) -> None:
        """Note a bucket of which up to ``gradients`` gradients are views, and to which we hold ``own`` references."""
        self._of_ddp[_storage_of(buffer)] = references_to_bucket_view(gradients) + own

    def is_in_bucket(self, memory: Tensor) -> bool:
        """Whether ``memory`` is a part of one of DDP's buckets."""
        return _storage_of(memory) in self._of_ddp

    def kept(self, parameters: Sequence[Parameter]) -> list[bool]:
        """For each parameter, whether a script keeps its gradient.

        Args:
            parameters: all parameters whose gradients have an excess of references.
        """
        # Several gradients may be views of one tensor, such as those of weights that forward concatenates.
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
