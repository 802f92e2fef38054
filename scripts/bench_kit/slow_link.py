"""A slow link without root: the kernel paces each TCP connection of a gloo process group (Linux).

`SO_MAX_PACING_RATE` is a limit per connection and direction. A gloo group has one connection to each peer, so with two
ranks every group is a link of its own, and what is limited is the group that carries the gradients. Whether the kernel
keeps to the limit must be measured: some sandboxes take the option and ignore it.
"""

import contextlib
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from ddp_crossover.comm.pace import connected_tcp_sockets, copy_of_socket

SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python has no name for it
_NO_LIMIT = struct.pack("@L", 2 ** (8 * struct.calcsize("@L")) - 1)
# Offsets in struct tcp_info, linux/tcp.h: tcpi_max_pacing_rate and tcpi_bytes_acked.
_MAX_PACING_RATE_AT, _BYTES_ACKED_AT = 112, 120
_TCP_INFO_BYTES = 256
# A connection may be faster than asked for a moment, when its first bytes go out at once.
_TOLERATED = 1.5


class PacingError(Exception):
    """The kernel does not keep to the speed that was asked for."""


class Connections:
    """TCP connections of this process: paces them, and counts what they have sent.

    Args:
        fds: their file descriptors, which must stay open.
    """

    def __init__(self, fds: Iterable[int]) -> None:
        self._fds = sorted(fds)

    def __len__(self) -> int:
        return len(self._fds)

    def pace(self, bytes_per_s: float | None) -> None:
        """Let each connection send at most this fast; None: as fast as it can.

        Raises:
            OSError: if the kernel does not know the option.
        """
        rate = _NO_LIMIT if bytes_per_s is None else struct.pack("@L", max(1, round(bytes_per_s)))
        for fd in self._fds:
            with copy_of_socket(fd) as connection:
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)

    def limits_bytes_per_s(self) -> list[int]:
        """How fast each connection may send, as the kernel says."""
        return self._info(_MAX_PACING_RATE_AT)

    def sent_bytes(self) -> int:
        """Bytes that peers have acknowledged, over all connections."""
        return sum(self._info(_BYTES_ACKED_AT))

    def _info(self, offset: int) -> list[int]:
        found = []
        for fd in self._fds:
            with copy_of_socket(fd) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            found.append(struct.unpack_from("@Q", info, offset)[0])
        return found


def why_not_here() -> str | None:
    """Why connections cannot be paced on this machine, or None if they can."""
    if not sys.platform.startswith("linux"):
        return "only Linux can pace a TCP connection"
    with socket.socket() as trial:
        try:
            Connections([trial.fileno()]).pace(1e6)
        except OSError as error:
            return f"this kernel does not pace TCP connections ({error})"
    return None


@contextlib.contextmanager
def slow_groups(bytes_per_s: float | None) -> Iterator[list[Connections]]:
    """Pace every gloo group that is made in this context, before anything is sent on it.

    So a group that `DearState` makes for itself is slow already when it measures its link.

    Args:
        bytes_per_s: the speed of each connection; None: as fast as it can.

    Yields:
        The connections of each new group, in the order in which the groups are made.
    """
    groups: list[Connections] = []
    new_group = dist.new_group

    def new_slow_group(*args: Any, **options: Any) -> Any:
        before = connected_tcp_sockets()
        group = new_group(*args, **options)
        connections = Connections(connected_tcp_sockets() - before)
        if bytes_per_s is not None:
            connections.pace(bytes_per_s)
        groups.append(connections)
        return group

    with mock.patch.object(dist, "new_group", new_slow_group):
        yield groups


def require_slow(asked_bytes_per_s: float, measured_bytes_per_s: float) -> None:
    """Check a measurement against what was asked for.

    Raises:
        PacingError: if the link is clearly faster.
    """
    if measured_bytes_per_s > _TOLERATED * asked_bytes_per_s:
        raise PacingError(
            f"the link was to send {asked_bytes_per_s / 1e6:.0f} MB/s and sends {measured_bytes_per_s / 1e6:.0f}: this "
            "kernel takes SO_MAX_PACING_RATE and ignores it, as some sandboxes do"
        )
