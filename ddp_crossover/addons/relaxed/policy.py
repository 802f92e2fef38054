"""What a policy is: when ranks share their parameters, and what is done with the mean of what they have learned.

A policy is what the user sets. It decides from numbers that all ranks have, so all decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_crossover.addons.relaxed.rule import Exchange, Rule
from ddp_crossover.options import WIRE_DTYPES

GROUPS = (None, "node", "grid", "pairs")
MERGES = ("delta", "daso")
REDUCTIONS = ("mean", "adasum")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Settings that all policies have. For what they mean see :class:`ddp_crossover.relaxed.LocalSGD`.

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

    def rule(self, exchange: Exchange) -> Rule:
        """What decides after which steps of one model ranks share, and may ask them by ``exchange``."""
        return Rule(self.every)

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
