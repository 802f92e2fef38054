"""The rounds of a leg: who sends what to whom, and what is computed from it, for where ranks are and what the wire is.

A scatter leg is a round in which slices are added up, a gather leg one in which they are copied. With nodes, a scatter
leg first has such a round inside of each node, and a gather leg last. Rounds know no threads and no tags. Where slices
travel as codes, see [Note: error feedback].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.addons.codes.codec import Codec
from ddp_crossover.addons.codes.coding import Coding
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.gloo_messages import Slice
from ddp_crossover.comm.nodes import Members, Nodes
from ddp_crossover.comm.sums import ScratchPool, add_in_rank_order


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


class _BoundedSlice(NamedTuple):
    """A slice of the fusion buffer, and where it begins and ends."""

    values: Tensor
    low: int
    high: int


def _slice_of(buffer: FusionBuffer, number: int, count: int) -> _BoundedSlice:
    [values], [bounds] = buffer.slices(number, count), buffer.bounds(number, count)
    return _BoundedSlice(values, *bounds)


class _CodedRound(Round):
    """What rounds with codes have in common.

    Args:
        memory: where the slices are: one part, of which all ranks have equal slices.
        members: the ranks.
        scratch: memory for payloads.
    """

    def __init__(self, memory: Memory, members: Members, scratch: ScratchPool) -> None:
        assert memory.buffer.coding is not None
        self._coding: Coding = memory.buffer.coding
        self._memory = memory
        self._members = members
        self._scratch = scratch
        self._payloads: list[Tensor] = []

    def release(self) -> None:
        self._scratch.free(self._payloads)
        self._payloads = []

    def _range(self, number: int) -> _BoundedSlice:
        return _slice_of(self._memory.buffer, number, self._members.cuts)

    def _payload(self, codec: Codec, numel: int) -> Tensor:
        payload = self._scratch.allocate(codec.payload_bytes(numel), torch.uint8)
        self._payloads.append(payload)
        return payload


class _CodesOfAllRound(_CodedRound):
    """Each member adds up what the codes stand for that all members have sent it, in their order."""

    @abstractmethod
    def _own(self) -> _BoundedSlice:
        """What this rank gets the sum of."""

    def receives(self) -> list[Slice]:
        numel = len(self._own().values)
        self._incoming = [self._payload(self._coding.scatter, numel) for _ in self._members.peers]
        return [Slice(peer, payload) for (peer, _), payload in zip(self._members.peers, self._incoming, strict=True)]

    def _encoded(self, gradients: _BoundedSlice) -> Tensor:
        payload = self._payload(self._coding.scatter, len(gradients.values))
        self._coding.encode(*gradients, payload)
        return payload

    def _add_up(self, own_term: Tensor, total: Tensor, *, own_is_coded: bool) -> None:
        """Set ``total`` to the sum; this rank's term of it is a payload, or no code."""
        codec = self._coding.scatter
        for place in range(len(self._members.ranks)):
            is_own = place == self._members.own
            term = own_term if is_own else self._incoming[place - (place > self._members.own)]
            if is_own and not own_is_coded:
                if place:  # as the first one it is where the sum will be
                    total.add_(term)
            elif place:
                codec.add(term, total)
            else:
                codec.decode(term, total)


class CodedSumRound(_CodesOfAllRound):
    """Each member gets its slice of the sum of what the members' codes stand for, and makes the code of that."""

    def sends(self) -> list[Slice]:
        return [Slice(peer, self._encoded(self._range(number))) for peer, number in self._members.peers]

    def finish(self) -> None:
        coding, own = self._coding, self._own()
        is_first = self._members.own == 0
        self._add_up(coding.own_term(*own, in_place=is_first), own.values, own_is_coded=False)
        payload = None if coding.gather is None else self._payload(coding.gather, len(own.values))
        coding.encode_sum(*own, payload)

    def _own(self) -> _BoundedSlice:
        return self._range(self._members.own_slice)


class SparseSumRound(_CodesOfAllRound):
    """All members get the sum of what their codes stand for, of all of their slices."""

    def sends(self) -> list[Slice]:
        self._own_code = self._encoded(self._own())
        return [Slice(peer, self._own_code) for peer, _ in self._members.peers]

    def finish(self) -> None:
        total = self._own().values
        self._add_up(self._own_code, total, own_is_coded=True)
        self._coding.note(total)

    def _own(self) -> _BoundedSlice:
        several = len(self._members.ranks)
        return _slice_of(self._memory.buffer, self._members.first // several, self._members.cuts // several)


class LocalSumRound(SumRound):
    """Each rank of a node gets its slice of the node's sum, which is coded later, with what others have left out."""

    def sends(self) -> list[Slice]:
        buffer = self._memory.buffer
        assert buffer.coding is not None
        for _, number in self._members.peers:
            buffer.coding.hand_over(*_slice_of(buffer, number, self._members.cuts))
        return super().sends()


class CodedCopyRound(_CodedRound):
    """Each member gets the sums of all others."""

    def receives(self) -> list[Slice]:
        assert self._coding.gather is not None
        self._incoming = [(self._range(number).values, peer) for peer, number in self._members.peers]
        return [Slice(peer, self._payload(self._coding.gather, len(values))) for values, peer in self._incoming]

    def sends(self) -> list[Slice]:
        assert self._coding.payload is not None
        return [Slice(peer, self._coding.payload) for peer, _ in self._members.peers]

    def finish(self) -> None:
        for payload, (values, _) in zip(self._payloads, self._incoming, strict=True):
            self._coding.decode_sum(payload, values)


class WatchedCopyRound(CopyRound):
    """Each member gets the slices of all others, which are sums of codes, as they are."""

    def finish(self) -> None:
        coding = self._memory.buffer.coding
        assert coding is not None
        for _, values in self.receives():
            coding.note(values)


class Route:
    """What both legs of a fusion group do, round by round.

    Inside of a node nothing is coded. Across nodes, a sparse code is sent to all instead of summed piece by piece and
    gathered, which is less while it is sparse: HiTopKComm (Shi et al., MLSys 2021, arXiv 2010.10458, section 3.2).

    Args:
        buffer: the fusion buffer.
        nodes: where the ranks are.
        scratch: memory for what peers send.
        sums_in_fp32: whether 16-bit terms are added up in fp32 and rounded once.

    Attributes:
        memory: the memory of the legs.
        scatter, gather: the rounds of each leg.
    """

    def __init__(self, buffer: FusionBuffer, nodes: Nodes, scratch: ScratchPool, *, sums_in_fp32: bool) -> None:
        memory = self.memory = Memory(buffer)
        coding = buffer.coding if len(nodes.across.ranks) > 1 else None  # inside of one node nothing is coded
        across, local = nodes.across, nodes.local
        copy = CopyRound if coding is None else WatchedCopyRound
        local_sum = SumRound if coding is None else LocalSumRound
        self.scatter: list[Round] = []
        self.gather: list[Round] = []
        if nodes.are_several:
            self.scatter.append(local_sum(memory, local, scratch, in_fp32=sums_in_fp32))
            self.gather.append(copy(memory, local))
        if coding is None:
            is_first = not nodes.are_several
            self.scatter.append(SumRound(memory, across, scratch, is_first=is_first, in_fp32=sums_in_fp32))
        elif coding.scatter.is_sparse and nodes.are_several:
            self.scatter.append(SparseSumRound(memory, across, scratch))
            return  # its sum is where all members need it
        else:
            self.scatter.append(CodedSumRound(memory, across, scratch))
        is_coded = coding is not None and coding.gather is not None
        self.gather.insert(0, CodedCopyRound(memory, across, scratch) if is_coded else copy(memory, across))

    def release(self) -> None:
        """Give memory back, because both legs have ended."""
        for one in (*self.scatter, *self.gather):
            one.release()
