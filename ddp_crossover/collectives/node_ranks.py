"""Finds out which ranks share a node."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from ddp_crossover.collectives.agreement import all_gather_json
from ddp_crossover.collectives.nodes import Nodes


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
