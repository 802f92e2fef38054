"""One connection of a client to its broker."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct

from .page import PageReader
from .places import Place, PlaceError
from .processes import peer_of
from .protocol import (
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


class RefusedError(Exception):
    """The broker turned this client away: says why."""


class BrokerConnection:
    """A connection that has said HELLO and been welcomed. Closed with its last reference: before that, another thread
    may be inside of a call.
    """

    def __init__(self, sock: socket.socket, page: PageReader, look_s: float) -> None:
        self._sock = sock
        self.page = page
        self._sock.setblocking(True)
        # The kernel's time-out saves Python's own poll() before each receive.
        look = struct.pack("ll", int(look_s), int(look_s % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, look)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, look)

    def __del__(self) -> None:
        self._sock.close()

    def send(self, kind: Kind, *, request: int = 0, fence: int = 0) -> None:
        """Raises ``OSError`` where the broker is gone or does not read."""
        self._sock.send(Message(kind, 0, request, fence).encode(), socket.MSG_NOSIGNAL)

    def receive(self) -> Message | None:
        """The next message, or None if none came in ``look_s``. Raises ``OSError``, ``ProtocolError``."""
        try:
            data = self._sock.recv(MESSAGE_BYTES + 1)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("the broker closed the connection")
        return decode(data)

    def discard(self) -> None:
        """Throw away what has come. Raises ``OSError`` where the broker is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._sock.recv(MESSAGE_BYTES + 1, socket.MSG_DONTWAIT):
                pass

    def wait_until_lost(self) -> None:
        """Return when the broker has gone or this side has shut down. Reads nothing."""
        poll = select.poll()
        poll.register(self._sock, 0)  # hang-ups and errors are always reported
        poll.poll()

    def shut_down(self) -> None:
        """End it for everybody, also for threads inside of it and forked processes that still have it open."""
        with contextlib.suppress(OSError):  # the broker was first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close_in_child(self) -> None:
        """Let go of the descriptor in a forked child, where no other thread runs. The parent's stays as it is."""
        self._sock.close()


def open_connection(place: Place, hello: Hello, timeout_s: float, look_s: float) -> BrokerConnection:
    """Connect and say HELLO, within ``timeout_s`` for each answer.

    Raises ``OSError``, :class:`RefusedError`, :class:`.places.PlaceError`, :class:`.protocol.ProtocolError`.
    """
    sock = _connect(place, timeout_s)
    try:
        return BrokerConnection(sock, _welcomed(*ask(sock, hello.encode(), MESSAGE_BYTES + 1)), look_s)
    except BaseException:
        sock.close()
        raise


def ask_status(place: Place, timeout_s: float) -> bytes:
    """The broker's state, as JSON. Raises as :func:`open_connection`."""
    with _connect(place, timeout_s) as sock:
        answer, _ = ask(sock, Message(Kind.STATUS).encode(), STATUS_BYTES)
        if answer[:1] != b"{":
            _raise_refusal(answer)
        return answer


def _connect(place: Place, timeout_s: float) -> socket.socket:
    owner = place.owner()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(place.socket))
        if peer_of(sock).uid != owner:
            raise PlaceError(f"{place.socket} is served by another user than the owner of its directory")
    except BaseException:
        sock.close()
        raise
    return sock


def ask(sock: socket.socket, opening: bytes, answer_bytes: int) -> tuple[bytes, list[int]]:
    """The broker's answer to our first message, and the descriptors that came with it.

    It may have refused us before we said a word, or while we did. The kernel reports that first, as an error; after
    that, why is there to be read.
    """
    with contextlib.suppress(BrokenPipeError):
        sock.send(opening)
    try:
        data, fds, _, _ = socket.recv_fds(sock, answer_bytes, maxfds=1)
    except ConnectionResetError:
        data, fds, _, _ = socket.recv_fds(sock, answer_bytes, maxfds=1)
    return data, fds


def _welcomed(data: bytes, fds: list[int]) -> PageReader:
    try:
        message = _raise_refusal(data)
        if message.kind is not Kind.WELCOME or not fds:
            raise ProtocolError(Refusal.MALFORMED, f"{message.kind.name} instead of WELCOME")
        try:
            return PageReader(fds[0], message.value)
        except ValueError as error:
            raise ProtocolError(Refusal.MALFORMED, str(error)) from None
    finally:
        for fd in fds:
            os.close(fd)  # the mapping has its own


def _raise_refusal(data: bytes) -> Message:
    """The message in ``data``, unless it is a refusal or the end of the connection."""
    if not data:
        raise ConnectionResetError("the broker closed the connection")
    message = decode(data)
    if message.kind is Kind.REFUSED:
        raise RefusedError(f"the broker refused: {REFUSALS.get(message.value, 'reason unknown')}")
    return message
