"""What the kernel reports about the process at the other end of a socket. Linux only."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from pathlib import Path
from typing import NamedTuple

# What the lease asks of the system, as Python names it: other systems lack some of it.
_LINUX = (
    (socket, "SO_PEERCRED"),
    (os, "memfd_create"),
    (os, "sched_getaffinity"),
    (select, "epoll"),
)
_SO_PEERPIDFD = 77  # not in Python's socket module; Linux 6.5
_UCRED = struct.Struct("3i")


class Peer(NamedTuple):
    """A connected process. ``pid`` is 0 if it is not visible from here, for instance from another container."""

    pid: int
    uid: int


def require_linux() -> None:
    """Raise OSError on a system that the lease does not run on, before it fails in the middle of something."""
    missing = [f"{module.__name__}.{name}" for module, name in _LINUX if not hasattr(module, name)]
    if missing:
        raise OSError(
            f"the GPU lease runs on Linux only ({', '.join(missing)} missing here): leave out lease=, training does "
            "not need it"
        )


def peer_of(sock: socket.socket) -> Peer:
    """The process at the other end of ``sock``: the client, or on the client's side the listening broker."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def open_pidfd(sock: socket.socket, pid: int) -> int | None:
    """A descriptor that becomes readable when the process at the other end exits, or None if unavailable.

    The connection's end shows the exit as well, but late if a child of that process keeps the connection open. On
    kernels before 6.5, ``pid`` may already have been reused. The descriptor then refers to the wrong process, and only
    the connection's end is reliable.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return None  # the process has already exited
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal or a debugger. False if that cannot be determined."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The format is "pid (name) state ...", and the name may contain parentheses.
    return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")
