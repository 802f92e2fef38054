"""Which ranks exchange slices with each other: all of them, or first those of a node, then those across nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from ddp_crossover.comm.agreement import all_gather_json


@dataclass(frozen=True)
class Members:
    """The ranks that exchange slices in one round of a leg. The slice of the i-th is number ``first + i`` of ``cuts``.

    Attributes:
        ranks: the ranks, in the order in which their terms are added up.
        own: which of them this rank is.
        first: number of the slice of ``ranks[0]``.
        cuts: number of slices into which each part of a fusion buffer is cut.
    """

    ranks: tuple[int, ...]
    own: int
    first: int
    cuts: int

    @cached_property
    def peers(self) -> tuple[tuple[int, int], ...]:
        """(rank, number of its slice) of all others."""
        return tuple((rank, self.first + i) for i, rank in enumerate(self.ranks) if i != self.own)

    @cached_property
    def own_slice(self) -> int:
        return self.first + self.own


@dataclass(frozen=True)
class Nodes:
    """Where the ranks are.

    Attributes:
        local: the ranks on this rank's node.
        across: the ranks that have this rank's place on their nodes, in the order of the nodes. The slices of a node's
            rank are shared among these.
        shard_of: by rank, the number of the slice that it reduces, of as many as there are ranks.
    """

    local: Members
    across: Members
    shard_of: tuple[int, ...]

    @classmethod
    def flat(cls, rank: int, world_size: int) -> Nodes:
        """All ranks exchange slices with all others, wherever they are."""
        ranks = tuple(range(world_size))
        return cls(Members((rank,), 0, 0, 1), Members(ranks, rank, 0, world_size), ranks)

    @classmethod
    def of(cls, nodes: Sequence[Sequence[int]], rank: int) -> Nodes:
        """The ranks of each node, each rank once, in the order of their places on it.

        Raises:
            ValueError: if nodes have different numbers of ranks.
        """
        sizes = [len(node) for node in nodes]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"groups='node' needs equally many ranks on each node, got {', '.join(map(str, sizes))}: "
                "start the same number on each, or leave out groups="
            )
        world_size = sum(sizes)
        node = next(i for i, ranks in enumerate(nodes) if rank in ranks)
        place = list(nodes[node]).index(rank)
        shard_of = [0] * world_size
        for i, ranks in enumerate(nodes):
            for j, member in enumerate(ranks):
                shard_of[member] = j * len(nodes) + i
        return cls(
            local=Members(tuple(nodes[node]), place, 0, sizes[0]),
            across=Members(tuple(ranks[place] for ranks in nodes), node, place * len(nodes), world_size),
            shard_of=tuple(shard_of),
        )

    @cached_property
    def are_several(self) -> bool:
        """Whether legs have a round inside of each node, and one across nodes."""
        return len(self.local.ranks) > 1


def nodes_of(process_group: dist.ProcessGroup, device: torch.device) -> Nodes:
    """Where the ranks are: nodes have the numbers that torchrun gives them, or else the names of their hosts.

    Nodes are in the order of their lowest ranks, ranks of a node in their own order. All ranks must call it.

    Raises:
        ValueError: on every rank, if nodes have different numbers of ranks.
    """
    mine = os.environ.get("GROUP_RANK") or socket.gethostname()
    nodes: dict[str, list[int]] = {}
    for rank, node in enumerate(all_gather_json(mine, process_group, device)):
        nodes.setdefault(node, []).append(rank)
    return Nodes.of(list(nodes.values()), dist.get_rank(process_group))
