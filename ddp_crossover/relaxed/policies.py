"""When ranks share their parameters, and what is done with the mean of what they have learned: one class for each way.

A policy is what the user sets. It decides from numbers that all ranks have, so all decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from ddp_crossover.relaxed.state import RelaxedState

WIRE_DTYPES = ("torch.bfloat16", "torch.float16", "torch.int8")


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Each rank trains alone for some steps; then all take the mean of their parameters.

    Gradients do not travel. Every ``every`` steps each rank sends how far it has come since the last mean, which takes
    as many bytes as gradients of one step. With ``every=1`` and an optimizer that is linear in the gradients (SGD, with
    momentum and weight decay) parameters are those of plain DDP, up to rounding.

    Source: Stich, arXiv 1805.09767; post-local SGD: Lin et al., arXiv 1808.07217. With ``delay`` the merge keeps what a
    rank has learned meanwhile: x <- mean + (x - x_sent), as in CoCoD-SGD and Overlap-Local-SGD.

    Args:
        every: steps between two means.
        warmup: exact steps at the beginning, with the pipeline, under the options of :func:`ddp_crossover.attach`.
        delay: so many steps later the mean is merged, and until then it travels under compute. At most ``every``.
        wire_dtype: ``torch.bfloat16`` or ``torch.float16`` to send differences in 16 bits, ``torch.int8`` for 8-bit
            codes whose errors are made up for later. Default: their own dtype.

    Raises:
        ValueError: for numbers that are out of range.
    """

    every: int
    warmup: int = 0
    delay: int = 0
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("warmup", 0), ("delay", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{type(self).__name__}: {name} must be a whole number from {least}, got {value!r}")
        if self.delay > self.every:
            raise ValueError(
                f"{type(self).__name__}: delay={self.delay} steps are more than every={self.every}, and a mean has to "
                "be merged before the next one is made"
            )
        if self.wire_dtype is not None and str(self.wire_dtype) not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype must be {' or '.join(WIRE_DTYPES)}, got {self.wire_dtype!r}")

    @property
    def memories(self) -> int:
        """How many tensors like each parameter :meth:`advance` keeps."""
        return 0

    def advance(self, shared: Tensor, mean: Tensor, memories: Sequence[Tensor]) -> None:
        """Move the parameters that all ranks share, given the mean of the ranks' moves away from them.

        Args:
            shared: a parameter as all ranks had it after the last time; changed in place.
            mean: mean over ranks of how far each has moved away from it.
            memories: tensors like it, zero at first, kept from time to time.
        """
        shared.add_(mean)

    def attach(
        self, ddp: DistributedDataParallel, optimizer: Optimizer | Sequence[Optimizer], **options: object
    ) -> RelaxedState:
        """What :func:`ddp_crossover.attach` does with ``sync=`` this policy."""
        from ddp_crossover.relaxed.state import RelaxedState

        return RelaxedState(ddp, optimizer, self, **options)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """Local steps whose mean move is a gradient for an outer optimizer: SGD with Nesterov momentum.

    Needs fewer means than :class:`LocalSGD` for the same loss. With ``outer_lr=1`` and ``outer_momentum=0`` it is that.
    Takes the memory of the parameters once more.

    Source: Douillard et al., arXiv 2311.08105; with ``delay``, Streaming DiLoCo, arXiv 2501.18512, with another merge.

    Args:
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its momentum, from 0 to 1.
    """

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.outer_lr > 0:
            raise ValueError(f"DiLoCo: outer_lr must be greater than 0, got {self.outer_lr!r}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"DiLoCo: outer_momentum must be from 0 to below 1, got {self.outer_momentum!r}")

    @property
    def memories(self) -> int:
        return 1

    def advance(self, shared: Tensor, mean: Tensor, memories: Sequence[Tensor]) -> None:
        (velocity,) = memories
        velocity.mul_(self.outer_momentum).add_(mean)
        shared.add_(mean, alpha=self.outer_lr).add_(velocity, alpha=self.outer_lr * self.outer_momentum)
