"""The memory of a fusion group, as legs see it, and how its slices travel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ddp_crossover.comm.nodes import Nodes
from ddp_crossover.comm.round import Rounds
from ddp_crossover.comm.sums import RankWeights, ScratchPool


class Travel(Protocol):
    """How the slices of a fusion buffer travel, if not as they are."""

    def rounds(self, memory: Memory, nodes: Nodes, scratch: ScratchPool, *, sums_in_fp32: bool) -> Rounds:
        """What both legs do; see ``rounds_of``, which asks only if several ranks exchange slices across nodes."""

    def of_nothing(self) -> Travel:
        """The same for values that do not count, which change nothing here."""


@dataclass(frozen=True, eq=False)
class FusionBuffer:
    """The memory of a fusion group: one or more parts, of the same sizes and in the same order on all ranks.

    Each rank reduces its own slice of every part.

    Attributes:
        parts: flat tensors of one dtype.
        weights: what each rank's elements are multiplied by before they are added up; None: they are as they should be.
        owners: for each part, the rank that reduces all of it; None if ranks share every part.
        travel: how the slices travel; None: as they are. Else there is one part, which ranks share equally.
    """

    parts: tuple[Tensor, ...]
    weights: RankWeights | None = None
    owners: tuple[int, ...] | None = None
    travel: Travel | None = None
    _slices: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict, init=False, repr=False)

    def slices(self, number: int, count: int) -> list[Tensor]:
        """Slice ``number`` of ``count`` of each part, which may be empty. A rank reduces that of its number."""
        # Made once, because the same buffer has legs in every step.
        slices = self._slices.get((number, count))
        if slices is None:
            bounds = self.bounds(number, count)
            slices = [part[low:high] for part, (low, high) in zip(self.parts, bounds, strict=True)]
            self._slices[number, count] = slices
        return slices

    def bounds(self, number: int, count: int) -> list[tuple[int, int]]:
        """The range [low, high) of each part that :meth:`slices` returns; of equal sizes if ``count`` divides it."""
        if self.owners is None:
            return [(part.numel() * number // count, part.numel() * (number + 1) // count) for part in self.parts]
        return [
            (0, part.numel() if owner == number else 0) for part, owner in zip(self.parts, self.owners, strict=True)
        ]

    def whole(self) -> Tensor:
        """The only part, for links that need the buffer in one piece."""
        [part] = self.parts
        assert self.weights is None
        return part


class Memory:
    """The memory of the legs of one fusion group, which may be moved until its scatter leg is started.

    Attributes:
        buffer: the fusion buffer.
        landing: what gather legs send from and receive into; the buffer itself, but for sharded optimizers.
    """

    def __init__(self, buffer: FusionBuffer) -> None:
        self.buffer = self.landing = buffer

    def move(self, buffer: FusionBuffer, landing: FusionBuffer | None) -> None:
        """Use other memory, with parts of the same sizes; without a landing gather legs use the buffer."""
        self.buffer = buffer
        self.landing = buffer if landing is None else landing
