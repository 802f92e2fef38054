"""TCP connections over loopback whose reader may stop reading."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected ends. The second one's receive buffer is small: what is not read stays with the first."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        writer = socket.create_connection(listener.getsockname())
        reader, _ = listener.accept()
    with writer, reader:
        writer.setblocking(False)
        yield writer, reader


def fill(writer: socket.socket) -> int:
    """Write until nothing goes in any more; returns the bytes written."""
    written = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            written += writer.send(bytes(2**16))
    return written


def drain(reader: socket.socket, written: int) -> None:
    """Read all that was written."""
    while written > 0:
        written -= len(reader.recv(2**20))
