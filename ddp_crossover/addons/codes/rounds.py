"""The rounds of a leg whose slices travel as codes; see [Note: error feedback] in ``coding.py``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.addons.codes.codec import Codec
from ddp_crossover.addons.codes.coding import Coding
from ddp_crossover.comm.fusion_buffer import FusionBuffer, Memory
from ddp_crossover.comm.nodes import Members, Nodes
from ddp_crossover.comm.round import Round, Rounds, Slice
from ddp_crossover.comm.rounds import CopyRound, SumRound
from ddp_crossover.comm.sums import ScratchPool


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
        coding: the codes.
        memory: where the slices are: one part, of which all ranks have equal slices.
        members: the ranks.
        scratch: memory for payloads.
    """

    def __init__(self, coding: Coding, memory: Memory, members: Members, scratch: ScratchPool) -> None:
        self._coding = coding
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
        return [(peer, payload) for (peer, _), payload in zip(self._members.peers, self._incoming, strict=True)]

    def _encoded(self, gradients: _BoundedSlice) -> Tensor:
        payload = self._payload(self._coding.scatter, len(gradients.values))
        self._coding.encode(*gradients, payload)
        return payload

    def _decode_and_add(self, payloads: Sequence[Tensor], total: Tensor) -> None:
        """Set ``total`` to the sum of what these codes stand for."""
        codec = self._coding.scatter
        codec.decode(payloads[0], total)
        self._add(payloads[1:], total)

    def _add(self, payloads: Sequence[Tensor], total: Tensor) -> None:
        for payload in payloads:
            self._coding.scatter.add(payload, total)


class CodedSumRound(_CodesOfAllRound):
    """Each member gets its slice of the sum of what the members' codes stand for, and makes the code of that."""

    def sends(self) -> list[Slice]:
        return [(peer, self._encoded(self._range(number))) for peer, number in self._members.peers]

    def finish(self) -> None:
        coding, own, place = self._coding, self._own(), self._members.own
        # The second may come first: x0 + x1 is x1 + x0, but for the sign of zeros where a sparse code sends nothing.
        comes_first = place <= 1
        own_term = coding.own_term(*own, in_place=comes_first)
        if comes_first:
            self._add(self._incoming, own.values)
        else:
            self._decode_and_add(self._incoming[:place], own.values)
            own.values.add_(own_term)
            self._add(self._incoming[place:], own.values)
        payload = None if coding.gather is None else self._payload(coding.gather, len(own.values))
        coding.encode_sum(*own, payload)

    def _own(self) -> _BoundedSlice:
        return self._range(self._members.own_slice)


class SparseSumRound(_CodesOfAllRound):
    """All members get the sum of what their codes stand for, of all of their slices."""

    def sends(self) -> list[Slice]:
        self._own_code = self._encoded(self._own())
        return [(peer, self._own_code) for peer, _ in self._members.peers]

    def finish(self) -> None:
        total = self._own().values
        place = self._members.own
        self._decode_and_add([*self._incoming[:place], self._own_code, *self._incoming[place:]], total)
        self._coding.note(total)

    def _own(self) -> _BoundedSlice:
        several = len(self._members.ranks)
        return _slice_of(self._memory.buffer, self._members.first // several, self._members.cuts // several)


class LocalSumRound(SumRound):
    """Each rank of a node gets its slice of the node's sum, which is coded later, with what others have left out."""

    def __init__(
        self, coding: Coding, memory: Memory, members: Members, scratch: ScratchPool, *, in_fp32: bool
    ) -> None:
        super().__init__(memory, members, scratch, in_fp32=in_fp32)
        self._coding = coding

    def sends(self) -> list[Slice]:
        for _, number in self._members.peers:
            self._coding.hand_over(*_slice_of(self._memory.buffer, number, self._members.cuts))
        return super().sends()


class CodedCopyRound(_CodedRound):
    """Each member gets the sums of all others."""

    def receives(self) -> list[Slice]:
        assert self._coding.gather is not None
        self._incoming = [(self._range(number).values, peer) for peer, number in self._members.peers]
        return [(peer, self._payload(self._coding.gather, len(values))) for values, peer in self._incoming]

    def sends(self) -> list[Slice]:
        assert self._coding.payload is not None
        return [(peer, self._coding.payload) for peer, _ in self._members.peers]

    def finish(self) -> None:
        for payload, (values, _) in zip(self._payloads, self._incoming, strict=True):
            self._coding.decode_sum(payload, values)


class WatchedCopyRound(CopyRound):
    """Each member gets the slices of all others, which are sums of codes, as they are."""

    def __init__(self, coding: Coding, memory: Memory, members: Members) -> None:
        super().__init__(memory, members)
        self._coding = coding

    def finish(self) -> None:
        for _, values in self.receives():
            self._coding.note(values)


class CodedTravel:
    """How the slices of a fusion buffer travel as codes; see :class:`ddp_crossover.comm.fusion_buffer.Travel`.

    Args:
        coding: the codes.
    """

    def __init__(self, coding: Coding) -> None:
        self.coding = coding

    def rounds(self, memory: Memory, nodes: Nodes, scratch: ScratchPool, *, sums_in_fp32: bool) -> Rounds:
        """What both legs of a fusion group do. Inside of a node nothing is coded.

        Across nodes, a sparse code is sent to all instead of summed piece by piece and gathered, which is less while it
        is sparse: HiTopKComm (Shi et al., MLSys 2021, arXiv 2010.10458, section 3.2).
        """
        coding, across, local = self.coding, nodes.across, nodes.local
        rounds = Rounds([], [])
        if nodes.are_several:
            rounds.scatter.append(LocalSumRound(coding, memory, local, scratch, in_fp32=sums_in_fp32))
            rounds.gather.append(WatchedCopyRound(coding, memory, local))
            if coding.scatter.is_sparse:
                rounds.scatter.append(SparseSumRound(coding, memory, across, scratch))
                return rounds  # its sum is where all members need it
        rounds.scatter.append(CodedSumRound(coding, memory, across, scratch))
        watched = WatchedCopyRound(coding, memory, across)
        rounds.gather.insert(0, watched if coding.gather is None else CodedCopyRound(coding, memory, across, scratch))
        return rounds

    def of_nothing(self) -> CodedTravel:
        return CodedTravel(self.coding.without_residuals())
