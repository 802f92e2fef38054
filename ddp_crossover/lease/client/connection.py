"""One connection from a client to its broker."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct

from ..directory import BrokerDirectory, DirectoryError
from ..peer_process import peer_of
from ..protocol import (
    MESSAGE_BYTES,
    REFUSALS,
    STATUS_BYTES,
    Hello,
    Kind,
    Message,
    ProtocolError,
    Refusal,
    decode,
)
from ..state_page import PageReader


class RefusedError(Exception):
    """The broker refused this client. The message gives the reason."""


class BrokerConnection:
    """A connection after HELLO and WELCOME.

    The socket is closed only with the last reference, because another thread may be in a call on it before that.

    Args:
        sock: the connected socket, which this object then owns.
        page: the state page of the connection's resource.
        timeout_s: time-out of each send and receive, in seconds.
    """

    def __init__(self, sock: socket.socket, page: PageReader, timeout_s: float) -> None:
        self._sock = sock
        self.page = page
        self._sock.setblocking(True)
        # With the kernel's time-out, Python needs no poll() before each receive.
        timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def __del__(self) -> None:
        self._sock.close()

    def send(self, kind: Kind, *, request: int = 0, fence: int = 0) -> None:
        """Send a message. Raises ``OSError`` if the broker is gone or does not read."""
        self._sock.send(Message(kind, 0, request, fence).encode(), socket.MSG_NOSIGNAL)

    def receive(self) -> Message | None:
        """Return the next message, or None after ``timeout_s`` without one. Raises ``OSError``, ``ProtocolError``."""
        try:
            data = self._sock.recv(MESSAGE_BYTES + 1)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("the broker closed the connection")
        return decode(data)

    def discard_received(self) -> None:
        """Drop all received messages without waiting. Raises ``OSError`` if the connection failed."""
        with contextlib.suppress(BlockingIOError):
            while self._sock.recv(MESSAGE_BYTES + 1, socket.MSG_DONTWAIT):
                pass

    def wait_until_lost(self) -> None:
        """Block until the broker is gone or this side has shut down. Reads no messages."""
        poll = select.poll()
        poll.register(self._sock, 0)  # POLLHUP and POLLERR are always reported
        poll.poll()

    def shut_down(self) -> None:
        """Shut the connection down, also for threads in a call on it and for forked processes that have it open."""
        with contextlib.suppress(OSError):  # the broker closed it first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child, which has no other threads. The parent's connection stays open."""
        self._sock.close()


def open_connection(
    directory: BrokerDirectory, hello: Hello, timeout_s: float, receive_timeout_s: float
) -> BrokerConnection:
    """Connect and exchange HELLO and WELCOME. Each socket call of that may take ``timeout_s``.

    Raises ``OSError``, :class:`RefusedError`, :class:`..directory.DirectoryError`, :class:`..protocol.ProtocolError`.
    """
    sock = _connect(directory, timeout_s)
    try:
        return BrokerConnection(sock, _open_page(*ask(sock, hello.encode(), MESSAGE_BYTES + 1)), receive_timeout_s)
    except BaseException:
        sock.close()
        raise


def ask_status(directory: BrokerDirectory, timeout_s: float) -> bytes:
    """Return the broker's state as JSON. Raises the errors of :func:`open_connection`."""
    with _connect(directory, timeout_s) as sock:
        answer, _ = ask(sock, Message(Kind.STATUS).encode(), STATUS_BYTES)
        if answer[:1] != b"{":
            _decode_answer(answer)
        return answer


def _connect(directory: BrokerDirectory, timeout_s: float) -> socket.socket:
    owner = directory.owner()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(directory.socket))
        if peer_of(sock).uid != owner:
            raise DirectoryError(
                f"the broker at {directory.socket} belongs to another user than its directory: "
                "end that broker, or choose another directory"
            )
    except BaseException:
        sock.close()
        raise
    return sock


def ask(sock: socket.socket, opening: bytes, answer_bytes: int) -> tuple[bytes, list[int]]:
    """Send ``opening`` and return the broker's answer with the file descriptors that came with it.

    The broker may refuse and close the connection before or during our send. The kernel then reports an error first;
    the broker's message with the reason can still be read after that.
    """
    with contextlib.suppress(BrokenPipeError):
        sock.send(opening)
    try:
        data, fds, _, _ = socket.recv_fds(sock, answer_bytes, maxfds=1)
    except ConnectionResetError:
        data, fds, _, _ = socket.recv_fds(sock, answer_bytes, maxfds=1)
    return data, fds


def _open_page(data: bytes, fds: list[int]) -> PageReader:
    """Map the state page that came with WELCOME."""
    try:
        message = _decode_answer(data)
        if message.kind is not Kind.WELCOME or not fds:
            raise ProtocolError(Refusal.MALFORMED, f"the broker sent {message.kind.name} instead of WELCOME")
        try:
            return PageReader(fds[0], message.value)
        except ValueError as error:
            raise ProtocolError(Refusal.MALFORMED, str(error)) from None
    finally:
        for fd in fds:
            os.close(fd)  # the mapping keeps its own reference


def _decode_answer(data: bytes) -> Message:
    """Decode the message in ``data``. Raises for a refusal and for the end of the connection."""
    if not data:
        raise ConnectionResetError("the broker closed the connection")
    message = decode(data)
    if message.kind is Kind.REFUSED:
        raise RefusedError(f"the broker refused the connection: {REFUSALS.get(message.value, 'the reason is unknown')}")
    return message
