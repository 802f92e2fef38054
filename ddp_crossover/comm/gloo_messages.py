"""Messages between this rank and its peers: slices of buffers, matched by tag.

One tag per iteration, leg and fusion group: a late message never matches another leg's receive. The peer for whose
messages this rank waits is named long before the process group's timeout ends the job.

With several connections a slice travels in as many parts, since a link may limit each of them: clouds do, and so does
TCP over long distances. Both sides cut alike, because the slice that one sends is as long as the one that the other
receives.

[Note: one way]
Each connection carries slices one way only, by two process groups. Gloo locks a connection while a thread copies a
message into its socket. If something arrives on it meanwhile, gloo's loop asks for it again and again, and on one core
keeps the thread that has the lock from its work: at 1 Gb/s the loop took a fifth more processor time.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.comm.leg import MAX_GROUPS
from ddp_crossover.comm.meter import LinkMeter
from ddp_crossover.comm.round import Slice
from ddp_crossover.log import say

# A wait is reported once it is longer than this and than this share of the group's timeout: 30 s of 30 minutes.
LONG_S = 10.0
LONG_SHARE = 1 / 60
_LOOKS_PER_WAIT = 4


class Awaited(NamedTuple):
    """One message for which a thread of this rank waits now.

    Attributes:
        peer: the rank in the group that has to send or receive it.
        label: the leg, such as ``scatter leg of fusion group 3``.
        is_proof: whether only ``peer`` itself can be the cause. A rank that gathers may wait for a third one.
        is_send: whether the peer has to receive the message.
        since_s: when the wait for the leg's messages began, in seconds of the monotonic clock.
    """

    peer: int
    label: str
    is_proof: bool
    is_send: bool
    since_s: float


class LatePeers:
    """Looks from time to time for waits that have become long, and logs one line for each peer that is late.

    Args:
        rank_of: the global rank of each rank in the group.
        rank: this process' rank in the group.
        timeout_s: after so many seconds of waiting the group ends all legs.
        awaited: returns the messages for which threads wait now.
    """

    def __init__(
        self, rank_of: list[int], rank: int, timeout_s: float, awaited: Callable[[], Iterable[Awaited]]
    ) -> None:
        self._rank_of = rank_of
        self._rank = rank
        self._timeout_s = timeout_s
        self._awaited = awaited
        self._long_s = max(LONG_S, LONG_SHARE * timeout_s)
        self._named: set[int] = set()
        self._is_closed = threading.Event()

    def watch(self) -> None:
        """Look until :meth:`close`. Blocks: call it on a thread of its own."""
        while not self._is_closed.wait(self._long_s / _LOOKS_PER_WAIT):
            self.look(time.monotonic())

    def close(self) -> None:
        self._is_closed.set()

    def look(self, now_s: float) -> None:
        """Log each peer that is late and was not when last looked at."""
        late: dict[int, Awaited] = {}
        for message in sorted(self._awaited(), key=lambda one: (not one.is_proof, one.since_s)):
            if now_s - message.since_s >= self._long_s:
                late.setdefault(message.peer, message)
        # A rank that has sent what depends on itself alone is not blamed for waiting as this rank does.
        if any(message.is_proof for message in late.values()):
            late = {peer: message for peer, message in late.items() if message.is_proof}
        for peer, message in late.items():
            if peer not in self._named:
                say(self._line(message, now_s - message.since_s), logging.WARNING)
        self._named = set(late)

    def _line(self, message: Awaited, waited_s: float) -> str:
        peer = f"rank {self._rank_of[message.peer]}"
        does_not = f"{peer} does not receive" if message.is_send else f"{peer} has not sent"
        or_else = "" if message.is_proof else ", unless it waits for another rank itself"
        return (
            f"rank {self._rank_of[self._rank]} has waited {waited_s:.0f} s in the {message.label}, because {does_not} "
            f"its part{or_else}; the job ends with an error when a wait reaches {self._timeout_s:.0f} s"
        )


# A gloo tag has 31 bits: 13 of the iteration, 2 of the kind, 16 of the group.
_ITERATIONS = 2**13
_NO_GROUP = MAX_GROUPS
_ABORT = timedelta(milliseconds=1)
# A part that takes less time on the wire than its message takes the host is not worth one.
LEAST_PART_BYTES = 2**16


class MessageKind(enum.IntEnum):
    """Which leg a message belongs to, and with nodes which of its two rounds."""

    SCATTER = 0
    GATHER = 1
    SCATTER_AGAIN = 2
    GATHER_AGAIN = 3


# A send or a receive that was posted: of which peer, its work, whether it is a send. Each leg makes four or more.
Message = tuple[int, dist.Work, bool]


class Connection(NamedTuple):
    """Process groups of the same ranks, which carry messages one way each; their backend is gloo.

    Attributes:
        ascending: for messages to higher ranks of the group.
        descending: for messages to lower ranks.
    """

    ascending: dist.ProcessGroup
    descending: dist.ProcessGroup


def message_tag(kind: MessageKind, iteration: int, group: int) -> int:
    """The tag of all messages of one leg."""
    return (iteration % _ITERATIONS) << 18 | kind << 16 | group


def small_exchange_tag(number: int) -> int:
    """The tag of the exchange of small tensors with this number."""
    return message_tag(MessageKind.SCATTER, number, _NO_GROUP)


class PeerMessages:
    """Sends slices to the peers of one process group, and receives theirs. Only :meth:`wait` blocks.

    Posts by methods of the groups: around these, ``isend`` and ``irecv`` call a dozen functions for each message, which
    take longer than the message on a thread that wakes up for each leg.

    Args:
        connections: connections to each peer, all of the same ranks.
        meter: counts the bytes that are sent.

    Attributes:
        rank: this process' rank in the group.
        world_size: number of ranks in the group.
        peers: the other ranks.
    """

    def __init__(self, connections: Sequence[Connection], meter: LinkMeter) -> None:
        any_group = connections[0].ascending
        self.rank = dist.get_rank(any_group)
        self.world_size = dist.get_world_size(any_group)
        self.peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self._ascending = [connection.ascending for connection in connections]
        self._descending = [connection.descending for connection in connections]
        self._meter = meter
        # By thread, as in `Awaited`. Takes no lock, since each thread has its own entry.
        self._awaited: dict[int, tuple[Message, str, bool, float]] = {}

    def receive(self, slices: Sequence[Slice], tag: int) -> list[Message]:
        """Post receives; empty slices are left out on both sides."""
        parts = self._parts(slices, tag, self._descending, self._ascending)
        return [(peer, group.recv([part], peer, tag), False) for group, peer, part in parts]

    def wait(self, messages: Sequence[Message], label: str, *, is_proof: bool = False) -> None:
        """Wait for messages of one leg, one after the other; ``label`` and ``is_proof`` are for :meth:`awaited`."""
        thread, since_s = threading.get_ident(), time.monotonic()
        is_proof = is_proof or self.world_size == 2
        try:
            for message in messages:
                self._awaited[thread] = (message, label, is_proof, since_s)
                _, work, _ = message
                work.wait()
        finally:
            self._awaited.pop(thread, None)

    def awaited(self) -> list[Awaited]:
        """Return the messages for which threads wait now, at most one for each thread."""
        return [
            Awaited(peer, label, is_proof, is_send, since_s)
            for (peer, _, is_send), label, is_proof, since_s in list(self._awaited.values())
        ]

    def send(self, slices: Sequence[Slice], tag: int) -> list[Message]:
        """Post sends; empty slices are left out on both sides."""
        self._meter.sent(sum([memory.nbytes for _, memory in slices]))
        parts = self._parts(slices, tag, self._ascending, self._descending)
        return [(peer, group.send([part], peer, tag), True) for group, peer, part in parts]

    def _parts(
        self, slices: Sequence[Slice], tag: int, of_higher: list[dist.ProcessGroup], of_lower: list[dist.ProcessGroup]
    ) -> list[tuple[dist.ProcessGroup, int, Tensor]]:
        """What travels in a message of its own: its group, its peer, its memory.

        Args:
            slices: the slices.
            tag: the tag of the messages.
            of_higher: the groups for slices of peers with a higher rank, one for each connection.
            of_lower: the same for lower ranks.
        """
        several = len(of_higher)
        parts = []
        for peer, memory in slices:
            if not memory.numel():
                continue
            groups = of_higher if peer > self.rank else of_lower
            count = 1 if several == 1 else max(1, min(several, memory.nbytes // LEAST_PART_BYTES))
            # Few parts are not always those of the first connection.
            for number, part in enumerate(memory.chunk(count) if count > 1 else (memory,), tag):
                parts.append((groups[number % several], peer, part))
        return parts

    def abort(self) -> None:
        """End all waits in gloo on this rank and its peers: a timed-out receive closes all connections of its group."""
        tag = message_tag(MessageKind.GATHER, 0, _NO_GROUP)
        groups = {*self._ascending, *self._descending}
        for peer in self.peers:
            for group in groups:
                with contextlib.suppress(Exception):  # the timeout, which is intended
                    group.recv([torch.empty(1, device="cpu")], peer, tag).wait(_ABORT)

    def close(self) -> None:
        """Drop the references to the process groups: the last one of each closes its sockets."""
        del self._ascending, self._descending
