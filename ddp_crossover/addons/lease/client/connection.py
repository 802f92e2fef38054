"""One connection from a client to its broker."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import time
from typing import NamedTuple

from ..directory import BrokerDirectory, DirectoryError
from ..peer_process import peer_of
from ..protocol import (
    MESSAGE_BYTES,
    REFUSALS,
    STATUS_BYTES,
    TAKES_OVER,
    Hello,
    Kind,
    Message,
    ProtocolError,
    Refusal,
    decode,
)
from ..shared_memory import NOBODY, NoteWriter, PageReader, Successor


class RefusedError(Exception):
    """The broker refused this client. The message gives the reason."""


EARLY = 1
"""Value of a grant that comes from another client, before that of the broker."""

_ONE_FD_BYTES = socket.CMSG_SPACE(4)
_MOST_NEIGHBOURS = 64


class Welcome(NamedTuple):
    """What a broker gives a client.

    Attributes:
        page: the state page of the connection's resource.
        member: the broker's number of the client.
        alarm: an eventfd on which other clients wake this one; None from an older broker, which lets nobody hand over.
        note: where to tell the broker of what was handed over; None without an alarm.
    """

    page: PageReader
    member: int
    alarm: int | None
    note: NoteWriter | None


class Neighbours:
    """The clients that this one may wake when it hands its resource over, as introduced by the broker.

    Each client has an *alarm*, an eventfd that the broker has made and given to clients of the same user. Waking is
    adding the promised fence to it. An eventfd wakes the other process on another core if one is free. A socket would
    wake it on this core, on the assumption that this process is about to sleep. A pipe raises SIGPIPE, and a futex
    takes longer to call through ``ctypes``. Clients do not spin while they wait: on two cores that took the core of the
    holder, and one hand-off in ten took half a millisecond.
    """

    def __init__(self) -> None:
        self._alarms: dict[int, int] = {}

    def add(self, member: int, fd: int) -> None:
        """Take over ``fd``, the alarm of ``member``. Beyond a limit, drops the one that has been known for longest."""
        if (known := self._alarms.pop(member, None)) is not None:
            os.close(known)
        if len(self._alarms) == _MOST_NEIGHBOURS:
            os.close(self._alarms.pop(next(iter(self._alarms))))
        self._alarms[member] = fd

    def knows(self, member: int) -> bool:
        return member in self._alarms

    def wake(self, member: int, fence: int) -> bool:
        """Tell ``member`` that its hold under ``fence`` has begun. Returns False if it cannot be told."""
        try:
            os.eventfd_write(self._alarms[member], fence)
        except (KeyError, OSError):  # not introduced, or it has not read others for long
            return False
        return True

    def close(self) -> None:
        while self._alarms:
            os.close(self._alarms.popitem()[1])


class BrokerConnection:
    """A connection after HELLO and WELCOME.

    The socket is closed only with the last reference, because another thread may be in a call on it before that.

    Args:
        sock: the connected socket, which this object then owns.
        welcome: what came with WELCOME, which this object then owns.
        timeout_s: time-out of each send and receive, in seconds.
    """

    def __init__(self, sock: socket.socket, welcome: Welcome, timeout_s: float) -> None:
        self._sock = sock
        self.page, self._member, self._alarm, self._note = welcome
        self._neighbours = Neighbours()
        self._timeout_s = timeout_s
        self._sock.setblocking(True)
        # With the kernel's time-out, Python needs no poll() before each call.
        timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def __del__(self) -> None:
        self.close_in_child()

    def send(self, kind: Kind, *, request: int = 0, fence: int = 0, successor: int = 0) -> None:
        """Send a message. Raises ``OSError`` if the broker is gone or does not read."""
        self._sock.send(Message(kind, 0, request, fence, successor).encode(), socket.MSG_NOSIGNAL)

    def receive(self, request: int, alone: bool) -> Message | None:
        """The broker's next message, or a GRANT with the value ``EARLY`` if another client hands over to ``request``.

        If ``alone``, does not look for the latter, which is cheaper. Returns None after ``timeout_s`` without either.
        Raises ``OSError``, ``ProtocolError``.
        """
        if alone or self._alarm is None:
            return self._read(wait=True)
        until_s = time.monotonic() + self._timeout_s
        # The set is not kept between calls: a signal handler must be able to wait while this thread does.
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._alarm, select.POLLIN)
        while ready := poll.poll(max(0.0, 1e3 * (until_s - time.monotonic()))):
            if ready[-1][0] == self._alarm and (fence := self._read_alarm()):
                # What comes too late, or after another that was not read, is not what the broker promises now.
                if self.page.promises(fence, self._member, request):
                    return Message(Kind.GRANT, EARLY, request, fence)
            elif (message := self._read()) is not None:
                return message
        return None

    def hand_over(self, fence: int) -> int:
        """End the hold under ``fence`` by waking the client that was promised the next one; return the fence of that.

        The broker will find it in the note. Returns 0 if nobody can be woken, and the hold is to be released.
        """
        successor = self._successor(fence)
        if not successor.fence or self._note is None:
            return 0
        # First the note: what the other client does next must find it there.
        self._note.write(fence, successor.fence, time.monotonic_ns())
        return successor.fence if self._neighbours.wake(successor.member, successor.fence) else 0

    def wake_successor(self, fence: int) -> int:
        """Like :meth:`hand_over`, for a client that sends RELEASE with a new request right afterwards."""
        successor = self._successor(fence)
        woken = successor.even_if_again and self._neighbours.wake(successor.member, successor.fence)
        return successor.fence if woken else 0

    def _successor(self, fence: int) -> Successor:
        """Who may be woken at the end of the hold under ``fence``."""
        successor = self.page.successor(fence)
        if successor.fence and not self._neighbours.knows(successor.member):
            self.discard_received()  # the introduction may be among it
            return successor if self._neighbours.knows(successor.member) else NOBODY
        return successor

    def discard_received(self) -> None:
        """Drop all received grants without waiting. Raises ``OSError`` if the connection failed."""
        while self._read() is not None:
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
        """Close the descriptors in a forked child, which has no other threads. The parent's connection stays open."""
        self._sock.close()
        self._neighbours.close()
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            os.close(alarm)

    def _read(self, wait: bool = False) -> Message | None:
        """The broker's next message; None if there is none, with ``wait`` for ``timeout_s``. Keeps introductions."""
        while True:
            try:
                # Not socket.recv_fds: it ignores flags (Python 3.11).
                flags = socket.MSG_CMSG_CLOEXEC if wait else socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                data, ancillary, _, _ = self._sock.recvmsg(MESSAGE_BYTES + 1, _ONE_FD_BYTES, flags)
            except BlockingIOError:
                return None
            if not data:
                raise ConnectionResetError("the broker closed the connection")
            message = decode(data)
            if message.kind is not Kind.INTRODUCE:
                return message
            for _, _, fd in ancillary:
                self._neighbours.add(message.value, int.from_bytes(fd, sys.byteorder))

    def _read_alarm(self) -> int:
        """The sum of the fences that other clients have handed over since the last look, 0 if none."""
        try:
            return os.eventfd_read(self._alarm) if self._alarm is not None else 0
        except BlockingIOError:  # a signal handler has read it
            return 0


def open_connection(
    directory: BrokerDirectory, hello: Hello, timeout_s: float, receive_timeout_s: float
) -> BrokerConnection:
    """Connect and exchange HELLO and WELCOME. Each socket call of that may take ``timeout_s``.

    Raises ``OSError``, :class:`RefusedError`, :class:`..directory.DirectoryError`, :class:`..protocol.ProtocolError`.
    """
    sock = _connect(directory, timeout_s)
    try:
        welcome = _open_welcome(*ask(sock, hello.encode(TAKES_OVER), MESSAGE_BYTES + 1))
        return BrokerConnection(sock, welcome, receive_timeout_s)
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
        data, fds, _, _ = socket.recv_fds(sock, answer_bytes, maxfds=3)
    except ConnectionResetError:
        data, fds, _, _ = socket.recv_fds(sock, answer_bytes, maxfds=3)
    return data, fds


def _open_welcome(data: bytes, fds: list[int]) -> Welcome:
    """Map and keep what has come with WELCOME."""
    try:
        message = _decode_answer(data)
        if message.kind is not Kind.WELCOME or not fds:
            raise ProtocolError(Refusal.MALFORMED, f"the broker sent {message.kind.name} instead of WELCOME")
        try:
            page = PageReader(fds[0], message.value)
            note = NoteWriter(fds[2]) if len(fds) == 3 else None
        except ValueError as error:
            raise ProtocolError(Refusal.MALFORMED, str(error)) from None
        return Welcome(page, message.request, fds.pop(1) if note is not None else None, note)
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
