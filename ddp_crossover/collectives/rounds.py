"""The rounds of a leg over gloo: who sends what to whom, and what is computed from it.

A scatter leg is a round in which slices are added up, a gather leg one in which they are copied. With nodes, a scatter
leg first has such a round inside of each node, and a gather leg last. Rounds know no threads and no tags.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.gloo_messages import Slice
from ddp_crossover.collectives.nodes import Members
from ddp_crossover.collectives.rank_order_sum import ScratchPool, add_in_rank_order


class Memory:
    """The memory of the legs of one fusion group, which may be moved until its scatter leg is started.

    Attributes:
        buffer: the fusion buffer.
        landing: what gather legs send from and receive into; the buffer itself, but for sharded optimizers.
    """

    def __init__(self, buffer: FusionBuffer) -> None:
        self.buffer = self.landing = buffer

    def move(self, buffer: FusionBuffer, landing: FusionBuffer | None) -> None:
        """Use other memory; without a landing gather legs use the buffer."""
        self.buffer = buffer
        self.landing = buffer if landing is None else landing


class Round(ABC):
    """One exchange of messages. The order of the calls: ``receives``, ``sends``, ``finish``."""

    @abstractmethod
    def receives(self) -> list[Slice]:
        """What each peer fills; may be asked for long before the other two."""

    @abstractmethod
    def sends(self) -> list[Slice]:
        """What to send, once all earlier rounds are finished."""

    def finish(self) -> None:  # noqa: B027
        """Compute the result from what was received."""

    def release(self) -> None:  # noqa: B027
        """Give memory back that messages of this round have used, because both legs have ended."""


class SumRound(Round):
    """Each member gets its slice of the sum over the members, added up in their order.

    Args:
        memory: where the slices are.
        members: the ranks.
        scratch: memory for what peers send.
        is_first: whether terms have not been multiplied by the buffer's weights yet.
        in_fp32: whether 16-bit terms are added up in fp32 and rounded once.

    Attributes:
        incoming: memory for the slices of each peer, until they are added up.
    """

    def __init__(
        self, memory: Memory, members: Members, scratch: ScratchPool, *, is_first: bool = True, in_fp32: bool = False
    ) -> None:
        self._memory = memory
        self._members = members
        self._scratch = scratch
        self._is_first = is_first
        self._in_fp32 = in_fp32
        self.incoming: list[Tensor] = []
        self._parts: list[list[Tensor]] = []

    def receives(self) -> list[Slice]:
        own = self._slices(self._members.own_slice)
        numels = [part.numel() for part in own]
        self.incoming = [self._scratch.allocate(sum(numels), own[0].dtype) for _ in self._members.peers]
        is_whole = len(numels) == 1
        self._parts = [[memory] if is_whole else list(memory.split(numels)) for memory in self.incoming]
        return [
            Slice(peer, memory)
            for (peer, _), parts in zip(self._members.peers, self._parts, strict=True)
            for memory in parts
        ]

    def sends(self) -> list[Slice]:
        return [Slice(peer, memory) for peer, number in self._members.peers for memory in self._slices(number)]

    def finish(self) -> None:
        weights = self._memory.buffer.weights if self._is_first else None
        factors = None if weights is None else [weights.of_ranks[rank] for rank in self._members.ranks]
        for own, *incoming in zip(self._slices(self._members.own_slice), *self._parts, strict=True):
            add_in_rank_order(own, self._members.own, incoming, factors, in_fp32=self._in_fp32)
        self._parts = []
        self._scratch.free(self.incoming)
        self.incoming = []

    def _slices(self, number: int) -> list[Tensor]:
        return self._memory.buffer.slices(number, self._members.cuts)


class CopyRound(Round):
    """Each member gets the slices of all others.

    Args:
        memory: where the slices are.
        members: the ranks.
    """

    def __init__(self, memory: Memory, members: Members) -> None:
        self._memory = memory
        self._members = members

    def receives(self) -> list[Slice]:
        return [Slice(peer, memory) for peer, number in self._members.peers for memory in self._slices(number)]

    def sends(self) -> list[Slice]:
        own = self._slices(self._members.own_slice)
        return [Slice(peer, memory) for peer, _ in self._members.peers for memory in own]

    def _slices(self, number: int) -> list[Tensor]:
        return self._memory.landing.slices(number, self._members.cuts)
