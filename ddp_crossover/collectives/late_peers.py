"""Names the peer for whose messages this rank waits, long before the process group's timeout ends the job."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

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
        """Let :meth:`watch` return."""
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
