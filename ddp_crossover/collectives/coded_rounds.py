"""The rounds of legs whose slices travel as codes, see [Note: error feedback]."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.codecs.codec import Codec
from ddp_crossover.codecs.coding import Coding
from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.gloo_messages import Slice
from ddp_crossover.collectives.nodes import Members
from ddp_crossover.collectives.rank_order_sum import ScratchPool
from ddp_crossover.collectives.rounds import CopyRound, Memory, Round, SumRound


class _Range(NamedTuple):
    """A slice of the fusion buffer, and where it begins and ends."""

    values: Tensor
    low: int
    high: int


def _range_of(buffer: FusionBuffer, number: int, count: int) -> _Range:
    [values], [bounds] = buffer.slices(number, count), buffer.bounds(number, count)
    return _Range(values, *bounds)


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

    def _range(self, number: int) -> _Range:
        return _range_of(self._memory.buffer, number, self._members.cuts)

    def _payload(self, codec: Codec, numel: int) -> Tensor:
        payload = self._scratch.allocate(codec.payload_bytes(numel), torch.uint8)
        self._payloads.append(payload)
        return payload


class _CodesOfAllRound(_CodedRound):
    """Each member adds up what the codes stand for that all members have sent it, in their order."""

    @abstractmethod
    def _own(self) -> _Range:
        """What this rank gets the sum of."""

    def receives(self) -> list[Slice]:
        numel = len(self._own().values)
        self._incoming = [self._payload(self._coding.scatter, numel) for _ in self._members.peers]
        return [Slice(peer, payload) for (peer, _), payload in zip(self._members.peers, self._incoming, strict=True)]

    def _encoded(self, gradients: _Range) -> Tensor:
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
        own_term = self._encoded(own) if coding.own_is_coded else coding.own_term(*own, in_place=is_first)
        self._add_up(own_term, own.values, own_is_coded=coding.own_is_coded)
        payload = None if coding.gather is None else self._payload(coding.gather, len(own.values))
        coding.encode_sum(*own, payload)

    def _own(self) -> _Range:
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

    def _own(self) -> _Range:
        several = len(self._members.ranks)
        return _range_of(self._memory.buffer, self._members.first // several, self._members.cuts // several)


class LocalSumRound(SumRound):
    """Each rank of a node gets its slice of the node's sum, which is coded later, with what others have left out."""

    def sends(self) -> list[Slice]:
        buffer = self._memory.buffer
        assert buffer.coding is not None
        for _, number in self._members.peers:
            buffer.coding.hand_over(*_range_of(buffer, number, self._members.cuts))
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
