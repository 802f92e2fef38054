"""The sockets and processes of a broker's clients, in one epoll set."""

from __future__ import annotations

import os
import resource as rlimits
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..peer_process import Peer, open_pidfd, peer_of
from ..protocol import HELLO_BYTES, Kind, Message
from ..shared_memory import NoteReader
from .jobs import JobKey

_CONNECTIONS = 480


class Joined(NamedTuple):
    """What a connection has said in HELLO."""

    key: JobKey
    resource: str


@dataclass(eq=False, slots=True)
class Connection:
    """A client: its socket, its process, and its number as a member of its job."""

    sock: socket.socket
    peer: Peer
    pidfd: int | None
    member: int
    opened_s: float
    joined: Joined | None = None  # set by HELLO
    alarm: int | None = None  # an eventfd on which other clients wake it, if it takes over from them
    note: NoteReader | None = None  # where it tells what it has handed over
    introduced: set[int] = field(default_factory=set)  # members that it knows how to wake

    def receive(self) -> bytes | None:
        """The next message; empty at the end of the connection, None if there is none. Raises ``OSError``."""
        try:
            # Read one byte more than the largest message, so that a truncated oversized message is not accepted.
            return self.sock.recv(HELLO_BYTES + 1)
        except BlockingIOError:
            return None

    def join(self, joined: Joined) -> None:
        self.joined = joined

    def open_note(self) -> NoteReader:
        """Make the note on which it tells what it has handed over; the caller closes its descriptor."""
        self.note = NoteReader()
        return self.note

    def make_alarm(self) -> int:
        """Make the alarm and return it, for the client to read. Raises ``OSError``."""
        self.alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self.alarm


class Connections:
    """All connections. Iterating over it may be combined with :meth:`remove`."""

    def __init__(self, listener: socket.socket) -> None:
        self.capacity = _CONNECTIONS
        files = rlimits.getrlimit(rlimits.RLIMIT_NOFILE)[0]
        if files != rlimits.RLIM_INFINITY:
            self.capacity = min(self.capacity, (files - 32) // 3)  # each needs a socket, a pidfd and an alarm
        self._listener = listener
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._by_fd: dict[int, Connection] = {}  # keyed by socket and by pidfd
        self._by_member: dict[int, Connection] = {}
        self._next_member = 1
        self._to_close: list[int] = []

    def __len__(self) -> int:
        return len(self._by_member)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._by_member.values()))

    def get(self, member: int) -> Connection | None:
        return self._by_member.get(member)

    def poll(self, timeout_s: float) -> list[int]:
        """Wait for events and return their descriptors."""
        return [fd for fd, _ in self._epoll.poll(timeout_s)]

    def is_listener(self, fd: int) -> bool:
        return fd == self._listener.fileno()

    def find(self, fd: int) -> Connection | None:
        """The connection of a socket or pidfd; None if it was removed since the event occurred."""
        return self._by_fd.get(fd)

    def accept(self) -> Connection:
        """Accept a connection. Raises ``OSError``, and then nothing is left of it."""
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        peer = peer_of(sock)
        connection = Connection(sock, peer, open_pidfd(sock, peer.pid), self._next_member, time.monotonic())
        descriptors = [fd for fd in (sock.fileno(), connection.pidfd) if fd is not None]
        try:
            for fd in descriptors:
                self._epoll.register(fd, select.EPOLLIN)
        except OSError:
            sock.detach()
            for fd in descriptors:
                os.close(fd)  # epoll forgets a descriptor that is closed
            raise
        self._next_member += 1
        self._by_member[connection.member] = connection
        self._by_fd |= dict.fromkeys(descriptors, connection)
        return connection

    def introduce(self, member: int, other: int) -> None:
        """Give ``member`` the means to wake ``other``, once. Without it, the broker passes the resource on."""
        ours, theirs = self._by_member.get(member), self._by_member.get(other)
        if ours is None or theirs is None or ours.alarm is None or theirs.alarm is None or other in ours.introduced:
            return
        introduction = Message(Kind.INTRODUCE, value=other).encode()
        try:
            socket.send_fds(ours.sock, [introduction], [theirs.alarm])
        except OSError:
            return  # it has not read earlier ones; another try follows with the next promise
        ours.introduced.add(other)

    def remove(self, connection: Connection) -> bool:
        """Forget a connection, which :meth:`close_removed` will close. Returns False if it was removed before."""
        if self._by_member.pop(connection.member, None) is None:
            return False
        if connection.alarm is not None:
            os.close(connection.alarm)
        for other in self._by_member.values():
            other.introduced.discard(connection.member)
        for fd in (connection.sock.detach(), connection.pidfd):
            if fd is not None:
                del self._by_fd[fd]
                self._epoll.unregister(fd)
                self._to_close.append(fd)
        return True

    def close_removed(self) -> None:
        """Close removed connections, after all events of a poll: a reused descriptor would get those of the old one."""
        for fd in self._to_close:
            os.close(fd)
        self._to_close.clear()
