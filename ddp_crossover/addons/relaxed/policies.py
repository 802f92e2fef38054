"""The policies that users choose from: one class for each way of sharing parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.addons.relaxed.policy import Policy
from ddp_crossover.addons.relaxed.state import RelaxedState


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Policy):
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

    def attach(
        self, ddp: DistributedDataParallel, optimizer: Optimizer | Sequence[Optimizer], **options: object
    ) -> RelaxedState:
        """What :func:`ddp_crossover.attach` does with ``sync=`` this policy."""
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
