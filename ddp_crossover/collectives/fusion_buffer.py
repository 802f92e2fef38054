"""The memory of a fusion group, as legs see it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ddp_crossover.collectives.leg import slice_bounds


class FusionBuffer(NamedTuple):
    """The memory of a fusion group: one or more parts, of the same sizes and in the same order on all ranks.

    Each rank reduces its own slice of every part.

    Attributes:
        parts: flat tensors of one dtype.
        factor: every rank's elements are multiplied by it before they are added up.
    """

    parts: tuple[Tensor, ...]
    factor: float = 1.0

    def slices(self, rank: int, world_size: int) -> list[Tensor]:
        """The slice of each part that ``rank`` reduces, which may be empty."""
        bounds = (slice_bounds(part.numel(), world_size, rank) for part in self.parts)
        return [part[low:high] for part, (low, high) in zip(self.parts, bounds, strict=True)]

    def whole(self) -> Tensor:
        """The only part, for links that need the buffer in one piece."""
        [part] = self.parts
        assert self.factor == 1.0
        return part
