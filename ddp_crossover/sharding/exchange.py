"""Moves ranges of tensors between ranks: to new owners, or to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.collectives.link import Link
from ddp_crossover.sharding.ownership import Ownership, Range, covering, transfers

# At most about this much is exchanged at a time, because what is sent and received takes memory of its own.
EXCHANGE_BYTES = 8 * 2**20
T = TypeVar("T")


def in_chunks(items: Iterable[T], kind_of: Callable[[T], object], bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Items of one kind, and not too many bytes at a time; items of a kind must stand together."""
    chunk: list[T] = []
    held_bytes = 0
    for item in items:
        item_bytes = bytes_of(item)
        if chunk and (kind_of(item) != kind_of(chunk[0]) or held_bytes + item_bytes > EXCHANGE_BYTES):
            yield chunk
            chunk, held_bytes = [], 0
        chunk.append(item)
        held_bytes += item_bytes
    if chunk:
        yield chunk


def exchange(
    link: Link, have: Ownership, want: Ownership, mine: Mapping[Range, Tensor], like: Tensor
) -> Iterator[tuple[Range, Tensor]]:
    """Send every rank what it wants. A collective; blocks the host on gloo, and the current stream on NCCL.

    Args:
        link: link between the ranks.
        have: which rank has what.
        want: which rank wants what.
        mine: flat tensors of this rank's ranges.
        like: a tensor of the dtype and device of all values.

    Yields:
        The ranges that this rank wanted, cut as they were sent, with their values as flat tensors.
    """
    moves, rank = transfers(have, want), link.rank
    held = covering(have[rank])
    item_bytes = like.element_size()
    # As bytes: gloo does not know every dtype.
    outgoing = [_part_of(held, mine, each) for to_one in moves[rank] for each in to_one]
    sent = torch.cat([like.new_empty(0), *outgoing]).view(torch.uint8)
    numels = [sum(each.numel for each in of_one[rank]) for of_one in moves]
    received = sent.new_empty(sum(numels) * item_bytes)
    dist.all_to_all_single(
        received,
        sent,
        [numel * item_bytes for numel in numels],
        [sum(each.numel for each in to_one) * item_bytes for to_one in moves[rank]],
        group=link.process_group,
    )
    link.meter.sent(sum(each.numel for to, one in enumerate(moves[rank]) for each in one if to != rank) * item_bytes)
    values, begin = received.view(like.dtype), 0
    for of_one in moves:
        for each in of_one[rank]:
            yield each, values[begin : begin + each.numel]
            begin += each.numel


def _part_of(held: Mapping[int, list[Range]], mine: Mapping[Range, Tensor], part: Range) -> Tensor:
    whole = next(each for each in held[part.parameter] if each.start <= part.start and part.stop <= each.stop)
    return mine[whole][part.start - whole.start : part.stop - whole.start]
