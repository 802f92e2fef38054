"""The rounds of both legs of a fusion group, for where the ranks are and what the wire is."""

from __future__ import annotations

from ddp_crossover.collectives.coded_rounds import (
    CodedCopyRound,
    CodedSumRound,
    LocalSumRound,
    SparseSumRound,
    WatchedCopyRound,
)
from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.nodes import Nodes
from ddp_crossover.collectives.rank_order_sum import ScratchPool
from ddp_crossover.collectives.rounds import CopyRound, Memory, Round, SumRound


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
