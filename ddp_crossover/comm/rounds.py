"""The rounds of a leg: who sends what to whom, and what is computed from it, for where ranks are.

A scatter leg is a round in which slices are added up, a gather leg one in which they are copied. With nodes, a scatter
leg first has such a round inside of each node, and a gather leg last.
"""

from __future__ import annotations

from torch import Tensor

from ddp_crossover.comm.fusion_buffer import FusionBuffer, Memory
from ddp_crossover.comm.nodes import Members, Nodes
from ddp_crossover.comm.round import Round, Rounds, Slice
from ddp_crossover.comm.sums import ScratchPool, add_in_rank_order


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
        own = self._own_slices()
        numels = [part.numel() for part in own]
        self.incoming = [self._scratch.allocate(sum(numels), own[0].dtype) for _ in self._members.peers]
        is_whole = len(numels) == 1
        self._parts = [[memory] if is_whole else list(memory.split(numels)) for memory in self.incoming]
        return [
            (peer, memory)
            for (peer, _), parts in zip(self._members.peers, self._parts, strict=True)
            for memory in parts
        ]

    def sends(self) -> list[Slice]:
        return _slices_of_peers(self._memory.buffer, self._members)

    def finish(self) -> None:
        weights = self._memory.buffer.weights if self._is_first else None
        factors = None if weights is None else [weights.of_ranks[rank] for rank in self._members.ranks]
        for own, *incoming in zip(self._own_slices(), *self._parts, strict=True):
            add_in_rank_order(own, self._members.own, incoming, factors, in_fp32=self._in_fp32)
        self._parts = []
        self._scratch.free(self.incoming)
        self.incoming = []

    def _own_slices(self) -> list[Tensor]:
        return self._memory.buffer.slices(self._members.own_slice, self._members.cuts)


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
        return _slices_of_peers(self._memory.landing, self._members)

    def sends(self) -> list[Slice]:
        own = self._memory.landing.slices(self._members.own_slice, self._members.cuts)
        return [(peer, memory) for peer, _ in self._members.peers for memory in own]


def _slices_of_peers(buffer: FusionBuffer, members: Members) -> list[Slice]:
    """What of a buffer is of each other member, with its rank."""
    return [(peer, part) for peer, number in members.peers for part in buffer.slices(number, members.cuts)]


def rounds_of(memory: Memory, nodes: Nodes, scratch: ScratchPool, *, sums_in_fp32: bool) -> Rounds:
    """What both legs of a fusion group do.

    Args:
        memory: the memory of the legs.
        nodes: where the ranks are.
        scratch: memory for what peers send.
        sums_in_fp32: whether 16-bit terms are added up in fp32 and rounded once.
    """
    travel = memory.buffer.travel
    if travel is not None and len(nodes.across.ranks) > 1:
        return travel.rounds(memory, nodes, scratch, sums_in_fp32=sums_in_fp32)
    across = SumRound(memory, nodes.across, scratch, is_first=not nodes.are_several, in_fp32=sums_in_fp32)
    rounds = Rounds([across], [CopyRound(memory, nodes.across)])
    if nodes.are_several:
        rounds.scatter.insert(0, SumRound(memory, nodes.local, scratch, in_fp32=sums_in_fp32))
        rounds.gather.append(CopyRound(memory, nodes.local))
    return rounds
