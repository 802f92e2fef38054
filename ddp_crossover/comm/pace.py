"""Decides when the link is idle enough for a gather leg, which would delay every scatter leg behind it.

A gloo send is complete when its bytes are in a socket's buffer, which holds megabytes, so completion says nothing about
the link. The kernel (Linux) knows which bytes the peer has acknowledged.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import termios
from collections.abc import Iterable


class SocketBacklog:
    """Counts the bytes under way in some TCP sockets of this process.

    Args:
        fds: file descriptors of the sockets. They are only queried; a closed one counts as 0 bytes.
    """

    def __init__(self, fds: Iterable[int]) -> None:
        self._fds = list(fds)

    def unacknowledged_bytes(self) -> int:
        """Bytes written and not yet acknowledged by the peers. The call takes about 1 us per socket."""
        return sum(map(_unacknowledged_bytes, self._fds))


def connected_tcp_sockets() -> set[int]:
    """File descriptors of this process' TCP connections; none where the kernel is not Linux, as on macOS."""
    try:
        names = os.listdir("/proc/self/fd")
    except FileNotFoundError:
        return set()
    return {int(name) for name in names if _is_connected_tcp(int(name))}


def copy_of_socket(fd: int) -> socket.socket:
    """Return a socket object for the connection of ``fd``, which stays open when the object is closed."""
    return socket.socket(fileno=os.dup(fd))


def _is_connected_tcp(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        copy = copy_of_socket(fd)
    except OSError:  # closed since the directory was listed
        return False
    with copy:
        try:
            copy.getpeername()
        except OSError:
            return False
        return copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6)


def _unacknowledged_bytes(fd: int) -> int:
    try:
        # This is SIOCOUTQ, which has the same number as TIOCOUTQ.
        answer = fcntl.ioctl(fd, termios.TIOCOUTQ, struct.pack("i", 0))
    except OSError:
        return 0
    return int(struct.unpack("i", answer)[0])


# A gather leg is posted this long before the link runs idle; waking the thread takes part of it.
_LEAD_S = 2e-3
# The same if no later leg would have to wait behind the gather leg.
_RELAXED_LEAD_S = 8e-3
# The backlog at which to post a gather leg while the speed of the link is not known.
_LEAD_BYTES = 2**18
# The kernel does not notify about sent bytes, so the backlog must be polled. It shrinks by less than the link sends,
# because more is written meanwhile: to ask when the lead should be reached would mean to ask ever more often.
_SHORTEST_NAP_S = 5e-4
# A link that was measured while the machine stood still seems so slow that its backlog would take seconds to shrink.
_LONGEST_NAP_S = 2e-2


class Pace:
    """Tells when the link has almost nothing left to send.

    Attributes:
        s_per_byte: seconds that the link takes to send a byte; 0 while not known.
        is_relaxed: whether no scatter leg follows in this iteration.

    Args:
        backlog: backlog of the link's sockets.
    """

    def __init__(self, backlog: SocketBacklog) -> None:
        self.s_per_byte = 0.0
        self.is_relaxed = False
        self._backlog = backlog

    def begin_iteration(self) -> None:
        """Scatter legs follow."""
        self.is_relaxed = False

    def relax(self) -> None:
        """No scatter leg follows in this iteration."""
        self.is_relaxed = True

    def measure(self, s_per_byte: float) -> None:
        self.s_per_byte = s_per_byte

    def idle_in_s(self, *, nothing_is_ahead: bool) -> float:
        """0 if it is time to post a gather leg, else the number of seconds after which to ask again.

        Args:
            nothing_is_ahead: whether no scatter leg follows in this iteration, and no unposted gather leg is more
                urgent than this one.
        """
        # The gather leg that the next forward needs first is ready last: 8 ms of other legs ahead of it would lengthen
        # every step by 8 ms. Where nothing can follow it, to hold it back until the link is almost dry cost 12 ms of a
        # step of 400.
        lead_s = _RELAXED_LEAD_S if nothing_is_ahead else _LEAD_S
        lead_bytes = lead_s / self.s_per_byte if self.s_per_byte else _LEAD_BYTES
        too_much_bytes = self._backlog.unacknowledged_bytes() - lead_bytes
        if too_much_bytes <= 0:
            return 0.0
        return min(max(too_much_bytes * self.s_per_byte, _SHORTEST_NAP_S), _LONGEST_NAP_S)
