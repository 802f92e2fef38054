"""When ranks share their parameters, and what is done with the mean of what they have learned: one class for each way.

A policy is what the user sets. It decides from numbers that all ranks have, so all decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddp_crossover.options import WIRE_DTYPES

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from ddp_crossover.relaxed.state import RelaxedState

GROUPS = (None, "node", "grid", "pairs")
MERGES = ("delta", "daso")
REDUCTIONS = ("mean", "adasum")


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
        groups: ``"node"``: ranks of a node, see :class:`ddp_crossover.DearState`, share gradients in each step, and
            means cross between nodes. ``"grid"``: ranks stand in rows and columns, and means are in turn those of a row
            and of a column (DS-Sync, arXiv 2007.03298). ``"pairs"``: each mean is that of two ranks, with others each
            time. Default: all ranks.
        merge: ``"daso"`` merges a late mean as DASO does (arXiv 2104.05588), which loses a part of what was learned
            while it was on the way; only for comparison.
        reduction: ``"adasum"`` takes Adasum of the ranks' moves instead of their mean (arXiv 2006.02924).

    Raises:
        ValueError: for numbers that are out of range, and what does not go together.
    """

    every: int
    warmup: int = 0
    delay: int = 0
    wire_dtype: torch.dtype | None = None
    groups: str | None = None
    merge: str = "delta"
    reduction: str = "mean"

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("warmup", 0), ("delay", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{type(self).__name__}: {name} must be a whole number from {least}, got {value!r}")
        for name, values in (("groups", GROUPS), ("merge", MERGES), ("reduction", REDUCTIONS)):
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, got {getattr(self, name)!r}")
        if self.is_partial and (self.wire_dtype is not None or self.reduction != "mean" or self.merge != "delta"):
            raise ValueError(
                f"groups={self.groups!r} takes plain means of some ranks, and has no point that all ranks share: leave "
                "out wire_dtype=, merge= and reduction="
            )
        if self.reduction != "mean" and (self.wire_dtype is not None or self.groups is not None):
            raise ValueError(f"reduction={self.reduction!r} is that of all ranks: leave out wire_dtype= and groups=")
        if self.delay > self.every:
            raise ValueError(
                f"{type(self).__name__}: delay={self.delay} steps are more than every={self.every}, and a mean has to "
                "be merged before the next one is made"
            )
        if self.wire_dtype is not None and str(self.wire_dtype) not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype must be {' or '.join(WIRE_DTYPES)}, got {self.wire_dtype!r}")

    @property
    def kind(self) -> str:
        """What must be the same in the run that loads a checkpoint."""
        return (
            f"{type(self).__name__}(groups={self.groups!r}, reduction={self.reduction!r}, wire_dtype={self.wire_dtype})"
        )

    @property
    def is_partial(self) -> bool:
        """Whether a mean is that of some ranks only."""
        return self.groups in ("grid", "pairs")

    @property
    def memories(self) -> int:
        """How many tensors like each parameter :meth:`advance` keeps."""
        return 0

    def merged(self, now: Tensor, sent: Tensor, mean: Tensor, ranks: int) -> Tensor:
        """What a rank's parameter becomes when a mean arrives.

        Args:
            now: the parameter.
            sent: as it was when the mean was sent.
            mean: the parameter that is shared now.
            ranks: how many have sent theirs.
        """
        if self.merge == "daso" and self.delay:
            return (2 * self.delay * now + ranks * mean) / (2 * self.delay + ranks)
        return mean + (now - sent)  # without steps in between that is the mean, and all ranks get the same bits

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
        if self.is_partial or self.merge != "delta":
            raise ValueError("DiLoCo moves parameters that all ranks share: leave out groups= and merge=")
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
