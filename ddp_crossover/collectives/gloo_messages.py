"""Messages between this rank and its peers: slices of buffers, matched by tag.

One tag per iteration, leg and fusion group: a late message never matches another leg's receive.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.collectives.late_peers import Awaited
from ddp_crossover.collectives.leg import MAX_GROUPS
from ddp_crossover.collectives.meter import LinkMeter

# A gloo tag has 31 bits: 13 of the iteration, 2 of the kind, 16 of the group.
_ITERATIONS = 2**13
_NO_GROUP = MAX_GROUPS
_ABORT = timedelta(milliseconds=1)


class MessageKind(enum.IntEnum):
    """Which leg a message belongs to, and with nodes which of its two rounds."""

    SCATTER = 0
    GATHER = 1
    SCATTER_AGAIN = 2
    GATHER_AGAIN = 3


class Slice(NamedTuple):
    """Memory to send to one peer, or to fill with what one peer sends."""

    peer: int
    memory: Tensor


class Message(NamedTuple):
    """A send or a receive that was posted."""

    peer: int
    work: dist.Work
    is_send: bool


def message_tag(kind: MessageKind, iteration: int, group: int) -> int:
    """The tag of all messages of one leg."""
    return (iteration % _ITERATIONS) << 18 | kind << 16 | group


def small_exchange_tag(number: int) -> int:
    """The tag of the exchange of small tensors with this number."""
    return message_tag(MessageKind.SCATTER, number, _NO_GROUP)


class PeerMessages:
    """Sends slices to the peers of one process group, and receives theirs. Only :meth:`wait` blocks.

    Args:
        process_group: the group; its backend is gloo.
        meter: counts the bytes that are sent.

    Attributes:
        rank: this process' rank in the group.
        world_size: number of ranks in the group.
        peers: the other ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup, meter: LinkMeter) -> None:
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self._process_group = process_group
        self._meter = meter
        self._awaited: dict[int, Awaited] = {}  # by thread; takes no lock, since each thread has its own entry

    def receive(self, slices: Sequence[Slice], tag: int) -> list[Message]:
        """Post receives; empty slices are left out on both sides."""
        return [
            Message(
                peer, cast(dist.Work, dist.irecv(memory, group=self._process_group, group_src=peer, tag=tag)), False
            )
            for peer, memory in slices
            if memory.numel()
        ]

    def wait(self, messages: Sequence[Message], label: str, *, is_proof: bool = False) -> None:
        """Wait for messages of one leg, one after the other; ``label`` and ``is_proof`` are for :meth:`awaited`."""
        thread, since_s = threading.get_ident(), time.monotonic()
        is_proof = is_proof or self.world_size == 2
        try:
            for peer, work, is_send in messages:
                self._awaited[thread] = Awaited(peer, label, is_proof, is_send, since_s)
                work.wait()
        finally:
            self._awaited.pop(thread, None)

    def awaited(self) -> list[Awaited]:
        """Return the messages for which threads wait now, at most one for each thread."""
        return list(self._awaited.values())

    def send(self, slices: Sequence[Slice], tag: int) -> list[Message]:
        """Post sends; empty slices are left out on both sides."""
        slices = [one for one in slices if one.memory.numel()]
        self._meter.sent(sum(one.memory.nbytes for one in slices))
        return [
            Message(peer, cast(dist.Work, dist.isend(memory, group=self._process_group, group_dst=peer, tag=tag)), True)
            for peer, memory in slices
        ]

    def abort(self) -> None:
        """End all waits in gloo on this rank and its peers: a timed-out receive closes all connections of its group."""
        tag = message_tag(MessageKind.GATHER, 0, _NO_GROUP)
        for peer in self.peers:
            with contextlib.suppress(Exception):  # the timeout, which is intended
                [receive] = self.receive([Slice(peer, torch.empty(1))], tag)
                receive.work.wait(_ABORT)

    def close(self) -> None:
        """Drop the reference to the process group: the last one closes its sockets."""
        del self._process_group
