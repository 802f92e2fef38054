"""Ranks on several nodes, all on this machine, and what `groups="node"` is compared with.

The order of sums that users are promised: inside of a node in rank order, then over nodes in the order of their lowest
ranks. `node_order_hook` is the smallest thing that adds up like this. Like `reference.py`, it uses nothing of the
package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from equivalence import Case, compare_arms
from reference import add_in_order, mean_over_ranks

Layout = tuple[tuple[int, ...], ...]
"""The ranks of each node."""

TWO_BY_TWO: Layout = ((0, 1), (2, 3))
INTERLEAVED: Layout = ((0, 2), (1, 3))
CROSSED: Layout = ((0, 3), (1, 2))
TWO_NODES: Layout = ((0,), (1,))
ONE_NODE: Layout = ((0, 1),)
THREE_NODES: Layout = ((0,), (1,), (2,))
THREE_ON_ONE: Layout = ((0, 1, 2),)


def world_size(layout: Layout) -> int:
    """Number of ranks."""
    return sum(map(len, layout))


def node_of(layout: Layout, rank: int) -> int:
    """Number of the node that a rank is on."""
    return next(node for node, ranks in enumerate(layout) if rank in ranks)


@contextmanager
def on_nodes(layout: Layout) -> Iterator[None]:
    """This rank's environment, as torchrun makes it on the rank's node. Numbers of nodes are not in rank order."""
    with mock.patch.dict(os.environ, {"GROUP_RANK": str(7 - node_of(layout, dist.get_rank()))}):
        yield


class NodeOrder(NamedTuple):
    """The state of `node_order_hook`.

    Attributes:
        layout: the ranks of each node.
        wire_dtype: what wider gradients are cast to; sums of 16 bits are then rounded once on each node, and once more.
    """

    layout: Layout
    wire_dtype: torch.dtype | None = None


def add_up(terms: Sequence[torch.Tensor], order: NodeOrder) -> torch.Tensor:
    """The sum of the ranks' terms, inside of a node first."""
    in_fp32 = order.wire_dtype is not None and terms[0].itemsize < torch.float32.itemsize
    return add_in_order([add_in_order([terms[rank] for rank in node], in_fp32) for node in order.layout], in_fp32)


def node_order_hook(order, bucket):  # type: ignore[no-untyped-def]  # unannotated: DDP takes annotations for types, and would find text
    """Mean over ranks in node order."""
    return mean_over_ranks(bucket.buffer(), partial(add_up, order=order), order.wire_dtype)


def compare_on_nodes(case: Case, layout: Layout) -> None:
    """On every rank: `case` with `groups="node"` against DDP with `node_order_hook`, or plain DDP for one order."""
    order = NodeOrder(layout, case.dear.get("wire_dtype"))
    reference = None if world_size(layout) == 2 and order.wire_dtype is None else (order, node_order_hook)
    with on_nodes(layout):
        compare_arms(replace(case, dear={**case.dear, "groups": "node"}, reference=reference))


def check_on_nodes(case: Case, layout: Layout, on_ranks: Callable[..., Any]) -> None:
    """Run `case` on the ranks of these nodes; `on_ranks` is the fixture."""
    on_ranks(compare_on_nodes, world_size(layout), case, layout)
