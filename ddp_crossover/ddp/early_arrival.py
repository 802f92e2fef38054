"""Lets gradients reach the hook early, by giving DDP smaller buckets, and gives it its own back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover import device as gpu
from ddp_crossover.torch_internals.ddp import bucket_cap_bytes, has_run_forward, rebuild_buckets, rebuild_under_hook

# Size of DDP's buckets: small enough that gradients reach the hook early, and not too many of them, because each hook
# call costs tens of microseconds.
_ARRIVAL_BYTES = 2**20
_MAX_BUCKETS = 256
# On a GPU that time is the host's, which launches backward, and backward is shorter: fewer and larger ones.
_BUCKETS_ON_GPU = 16
_MOST_BYTES_ON_GPU = 8 * 2**20


class Buckets:
    """The buckets in which DDP hands over gradients.

    A gradient reaches the hook only when its whole bucket is complete. The planner decides which gradients travel
    together, so DDP's buckets of 25 MiB would only cost overlap.

    Args:
        ddp: the model.
        parameters: the parameters that it manages.

    Attributes:
        are_as_built: whether they are those that the user has set.
        were_changed: whether they have been changed since the first forward.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[Tensor]) -> None:
        self._ddp = weakref.ref(ddp)
        total_bytes = sum(parameter.nbytes for parameter in parameters)
        cap_bytes = _small_bytes(total_bytes, on_gpu=gpu.has_streams(parameters[0].device))
        self._small_bytes = cap_bytes if cap_bytes < bucket_cap_bytes(ddp) else None
        self.are_as_built = True
        self.were_changed = False
        self._allow_backward: Callable[[], None] | None = None

    def make_small_at_attach(self, parameters: Sequence[Tensor]) -> None:
        """Make them small before there is a hook. Until the next forward, backward is refused."""
        self.are_as_built = False
        ddp = self._ddp()
        if self._small_bytes is None or ddp is None:
            return
        rebuild_buckets(ddp, self._small_bytes)
        if has_run_forward(ddp):
            self._allow_backward = _refuse_backward_of_earlier_forward(ddp, parameters)

    def forward_begins(self) -> None:
        """Allow backward from now on."""
        if self._allow_backward is not None:
            self._allow_backward()
            self._allow_backward = None

    def change(self, *, as_built: bool) -> bool:
        """Change them at the beginning of a forward, if they are others; every rank must call it.

        Returns:
            Whether they were changed.
        """
        if as_built == self.are_as_built:
            return False
        self.are_as_built, self.were_changed = as_built, True
        ddp = self._ddp()
        if self._small_bytes is not None and ddp is not None:
            rebuild_under_hook(ddp, None if as_built else self._small_bytes)
        return True


def _small_bytes(total_bytes: int, *, on_gpu: bool) -> int:
    least_bytes = max(_ARRIVAL_BYTES, total_bytes // _MAX_BUCKETS)
    return max(least_bytes, min(total_bytes // _BUCKETS_ON_GPU, _MOST_BYTES_ON_GPU)) if on_gpu else least_bytes


def _refuse_backward_of_earlier_forward(
    ddp: DistributedDataParallel, parameters: Sequence[Tensor]
) -> Callable[[], None]:
    """Refuse the backward of an earlier forward, because DDP's new reducer would not reduce its gradients.

    Returns:
        A callback that allows backward again.
    """

    def refuse(gradients: object) -> NoReturn:
        raise RuntimeError(
            "dear_hook was attached between a forward and its backward, whose gradients DDP would not reduce: "
            "attach before the forward"
        )

    def allow(*_: object) -> None:
        for handle in handles:
            handle.remove()

    # Not hooks on the parameters: `torch.autograd.grad()` runs these, too, and it adds nothing to gradients.
    handles = [get_gradient_edge(parameter).node.register_prehook(refuse) for parameter in parameters]
    handles.append(ddp.register_forward_pre_hook(torch.compiler.disable(allow)))  # also works after detach()
    return allow
