"""What this process has really sent, asked from the kernel.

Per socket and so not disturbed by other traffic, and without root: `TCP_INFO` of every TCP
connection that the process has open. Bytes of closed connections are lost, so both readings must be
taken with the same connections open.
"""

from __future__ import annotations

import os
import socket
import stat
import struct

from ddp_crossover.comm.pace import copy_of_socket

# Offsets in `struct tcp_info` of linux/tcp.h (since 4.19).
_BYTES_SENT, _BYTES_RETRANSMITTED = 200, 208
_TCP_INFO_BYTES = 232


def tcp_bytes_sent() -> int:
    """Payload bytes that all TCP connections of this process have sent, without retransmissions."""
    return sum(tcp_bytes_by_socket().values())


def tcp_bytes_by_socket() -> dict[int, int]:
    """The same for each file descriptor; 0 for those that are no TCP connections."""
    return {int(fd): _bytes_sent(int(fd)) for fd in os.listdir("/proc/self/fd")}


def _bytes_sent(fd: int) -> int:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return 0
        with copy_of_socket(fd) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return 0
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:  # closed meanwhile, or not TCP
        return 0
    if len(info) < _BYTES_RETRANSMITTED + 8:
        raise RuntimeError("this kernel's TCP_INFO does not tell the bytes sent (Linux 4.19 does)")
    sent, again = (struct.unpack_from("Q", info, at)[0] for at in (_BYTES_SENT, _BYTES_RETRANSMITTED))
    return sent - again
