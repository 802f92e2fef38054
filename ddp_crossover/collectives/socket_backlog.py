"""How much of what was sent has not arrived yet, from the kernel (Linux).

A gloo send counts as complete when it is in a socket's buffer, which holds megabytes: that tells nothing of the link.
The kernel knows what the peer has acknowledged.
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
    """Bytes on their way in some TCP sockets of this process.

    Args:
        fds: their file descriptors. They are only asked; one that was closed counts as empty.
    """

    def __init__(self, fds: Iterable[int]) -> None:
        self._fds = list(fds)

    def unacknowledged_bytes(self) -> int:
        """Bytes that were written and that no peer has acknowledged. About 1 us a socket."""
        return sum(map(_unacknowledged_bytes, self._fds))


def connected_tcp_sockets() -> set[int]:
    """File descriptors of this process' TCP connections."""
    return {int(name) for name in os.listdir("/proc/self/fd") if _is_connected_tcp(int(name))}


def _is_connected_tcp(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:  # closed meanwhile
        return False
    with copy:
        try:
            copy.getpeername()
        except OSError:
            return False
        return copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6)


def _unacknowledged_bytes(fd: int) -> int:
    try:
        # SIOCOUTQ, which has the same number.
        answer = fcntl.ioctl(fd, termios.TIOCOUTQ, struct.pack("i", 0))
    except OSError:
        return 0
    return int(struct.unpack("i", answer)[0])
