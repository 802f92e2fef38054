"""Which ranks share with each other, round after round: their process groups and links, and the exchanges on them.

Without groups these are all ranks; in a grid, the lines of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.addons.codes.wire import wire_of
from ddp_crossover.addons.relaxed.adasum import AdasumExchange
from ddp_crossover.addons.relaxed.delta_merge import Exchange
from ddp_crossover.addons.relaxed.mean_exchange import MeanExchange
from ddp_crossover.addons.relaxed.policy import Policy
from ddp_crossover.comm.agreement import require_equal
from ddp_crossover.comm.all_reduce import family_of
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.nodes import nodes_of
from ddp_crossover.nccl.make_link import make_link
from ddp_crossover.torch_internals.ddp import process_group_timeout
from ddp_crossover.torch_internals.groups import OwnedGroups, new_group


def shape_of(groups: str, world_size: int) -> tuple[int, ...]:
    """The lengths of the grid's dimensions.

    Args:
        groups: ``"grid"``: two dimensions, as nearly square as may be; ``"pairs"``: as many as there are, of two.
        world_size: number of ranks.

    Raises:
        ValueError: if the ranks make no such grid.
    """
    if groups == "pairs":
        if world_size < 2 or world_size & (world_size - 1):
            raise ValueError(f"groups='pairs' needs 2, 4, 8, ... ranks, and there are {world_size}: leave out groups=")
        return (2,) * (world_size.bit_length() - 1)
    rows = max(rows for rows in range(1, math.isqrt(world_size) + 1) if world_size % rows == 0)
    if rows == 1:
        raise ValueError(
            f"groups='grid' needs ranks in rows and columns, and {world_size} is no product: leave out groups="
        )
    return rows, world_size // rows


def lines(shape: Sequence[int]) -> list[list[list[int]]]:
    """For each dimension, the ranks of each of its lines. Every rank is in one line of each dimension."""
    ranks = torch.arange(math.prod(shape), device="cpu").view(*shape)
    return [ranks.movedim(place, -1).reshape(-1, length).tolist() for place, length in enumerate(shape)]


class Partners:
    """What this rank shares with others through. All ranks must build it.

    Args:
        ddp: the model.
        named: names and parameters.
        policy: says who shares with whom, and how.

    Attributes:
        link: connects all ranks.
        exchanges: with whom this rank shares parameters, in turn.
        node: the ranks that share gradients in each step; None if this rank has its own.
        replicas: how many sets of parameters a mean is made of.

    Raises:
        ValueError: if the ranks make no such groups.
        DisagreementError: if ranks have different policies.
    """

    def __init__(self, ddp: DistributedDataParallel, named: Sequence[tuple[str, Parameter]], policy: Policy) -> None:
        self._of_ddp = ddp.process_group
        self._device = named[0][1].device
        require_equal("policy", {"sync": str(policy)}, self._of_ddp, self._device)
        self._timeout = process_group_timeout(self._of_ddp, self._device)
        self._groups = OwnedGroups()
        self.node: dist.ProcessGroup | None = None
        shape = shape_of(policy.groups, dist.get_world_size(self._of_ddp)) if policy.groups in ("grid", "pairs") else ()
        wire = wire_of(policy.wire_dtype, on_host=family_of(self._of_ddp, self._device) != "nccl")
        self.link = make_link(
            self._of_ddp, self._device, self._timeout, own_group=None, sums_in_fp32=wire.cast_to is not None
        )
        self._links = [self.link]
        self.replicas = self.link.world_size
        if policy.groups == "node":
            self._join_nodes()
        self.exchanges: list[Exchange]
        if shape:
            self._links += [self._link_of_line(of_dimension) for of_dimension in lines(shape)]
            self.exchanges = [MeanExchange(named, link, wire) for link in self._links[1:]]
        elif policy.reduction == "adasum":
            everybody = self._group_of(range(self.link.world_size))
            self.exchanges = [AdasumExchange([parameter for _, parameter in named], everybody)]
        else:
            self.exchanges = [MeanExchange(named, self.link, wire)]

    def _join_nodes(self) -> None:
        nodes = nodes_of(self.link.process_group, self._device)
        self.link.use_nodes(nodes)
        self.replicas //= len(nodes.local.ranks)
        if nodes.are_several:
            self.node = self._group_of(nodes.local.ranks)

    def _link_of_line(self, of_dimension: Sequence[Sequence[int]]) -> Link:
        group = self._group_of(next(line for line in of_dimension if self.link.rank in line))
        return make_link(group, self._device, self._timeout, own_group=group)

    def _group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A new process group of some of the model's ranks, which alone call this."""
        of_world = [dist.get_global_rank(self._of_ddp, rank) for rank in ranks]
        backend = dist.get_backend(self._of_ddp)
        group = new_group(of_world, backend=backend, timeout=self._timeout, purpose="means")
        self._groups.add(group)
        return group

    def shut_down(self) -> None:
        """End what runs on this rank, at any time, without the other ranks."""
        for link in self._links:
            link.shut_down()
        self._groups.give_up()  # torch waits for its own operations

    def close(self) -> None:
        """End links, and destroy all process groups. All ranks must call it."""
        self.shut_down()
        for link in self._links:
            link.close()
        self._groups.destroy()
