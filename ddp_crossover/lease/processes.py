"""What the kernel tells of the process at the other end of a socket. Linux."""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_SO_PEERPIDFD = 77  # not in Python's socket module; Linux 6.5
_UCRED = struct.Struct("3i")


class Peer(NamedTuple):
    """Who connected. ``pid`` is 0 where it is not visible from here, as from another container."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """The process that connected ``sock``; on the connecting side, the one that listens."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def open_pidfd(sock: socket.socket, pid: int) -> int | None:
    """A descriptor that becomes readable when the process at the other end ends, or None where there is none.

    The end of the connection says the same, but late if a child of that process holds it open. On kernels before 6.5
    the pid may have been reused by now: the descriptor then names a wrong process, and the end of the connection is
    what is left.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return None  # it has ended already
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def is_stopped(pid: int) -> bool:
    """Whether the process has been stopped by a signal or a debugger. False where that cannot be known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # "pid (name) state ...", where the name may hold anything, also brackets.
    return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")
