"""The broker: one process per host that grants resources in turn to the processes connected to it.

It runs one thread and one epoll set. :class:`.arbiter.Arbiter` decides who is granted what; this module handles
sockets, processes and the clock. No client may stop the broker or delay other clients, whatever it sends or omits.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource as rlimits
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from ..directory import BrokerDirectory
from ..peer_process import Peer, is_stopped, open_pidfd, peer_of
from ..protocol import HELLO_BYTES, Kind, Message, ProtocolError, Refusal, decode, decode_hello
from ..state_page import RESOURCE_SLOTS, PageWriter
from .arbiter import Arbiter, Grant, Limits, MismatchError
from .figures import ResourceFigures
from .jobs import JobKey

logger = logging.getLogger("ddp_crossover.lease")

_BEAT_S = 0.02  # while any job waits; by default, a client gives the broker up after 80 ms without a beat
_QUIET_S = 1.0
_STOPPED_CHECK_S = 0.25
_CONNECTIONS = 480


@dataclass(frozen=True)
class BrokerSettings:
    """Access rules and limits of a broker.

    Attributes:
        allowed_uids: users who may connect, besides the broker's own user.
        group: name of the group whose members can reach the socket; None for the owner only.
        idle_exit_s: seconds without a connection after which the broker exits; ``inf`` for never.
        hello_s: seconds that a connection may take to send HELLO.
        connections_per_uid: maximum number of connections of one user.
        jobs_per_uid: maximum number of jobs of one user.
        limits: how long holds may last.
    """

    allowed_uids: frozenset[int] = frozenset()
    group: str | None = None
    idle_exit_s: float = 60.0
    hello_s: float = 5.0
    connections_per_uid: int = 256
    jobs_per_uid: int = 64
    limits: Limits = field(default_factory=Limits)


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    peer: Peer
    pidfd: int | None
    member: int
    opened_s: float
    resource: str | None = None  # set by HELLO
    job: str = ""

    @property
    def key(self) -> JobKey:
        return JobKey(self.peer.uid, self.job)


class Broker:
    """The broker of a directory; :attr:`serving` is False if another broker already has the directory's lock.

    Raises:
        OSError, DirectoryError: the directory or its socket cannot be used.
    """

    def __init__(self, directory: BrokerDirectory, settings: BrokerSettings | None = None) -> None:
        self._directory = directory
        self._settings = settings or BrokerSettings()
        directory.make(self._settings.group)
        self._lock = directory.try_lock()
        self.serving = self._lock is not None
        if not self.serving:
            return
        self._listener, self._inode = directory.listen(self._settings.group)
        self._page = PageWriter()
        # Start fences at the nanoseconds since boot, which is above every fence of an earlier broker.
        self._arbiter = Arbiter(time.monotonic_ns(), self._settings.limits)
        self._connections: dict[int, _Connection] = {}  # keyed by socket fd and by pidfd
        self._members: dict[int, _Connection] = {}
        self._slots: dict[str, int] = {}
        self._figures: dict[str, ResourceFigures] = {}
        self._next_member = 1
        self._capacity = _CONNECTIONS
        self._to_close: list[int] = []
        self._grants = 0
        self._evictions = 0
        self._last_seen_s = self._quiet_check_s = self._stopped_check_s = time.monotonic()

    def serve_forever(self) -> None:
        """Serve until the broker has been idle for ``idle_exit_s`` or its socket was removed or replaced."""
        files = rlimits.getrlimit(rlimits.RLIMIT_NOFILE)[0]
        if files != rlimits.RLIM_INFINITY:
            self._capacity = min(self._capacity, (files - 32) // 2)  # each needs a socket and a pidfd
        gc.disable()  # the broker creates no reference cycles, and a collection would delay grants
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        logger.info("pid %d serves %s", os.getpid(), self._directory.socket)
        try:
            while self.serving:
                events = self._epoll.poll(self._wait_s())
                for fd, _ in events:
                    self._on_event(fd)
                self._tick(time.monotonic())
                # Close last: a reused descriptor number would receive the remaining events of the old one.
                for fd in self._to_close:
                    os.close(fd)
                self._to_close.clear()
        finally:
            if self._is_ours():
                self._directory.socket.unlink()
            logger.info("pid %d ends", os.getpid())

    def _wait_s(self) -> float:
        if not self._arbiter.contended():
            return _QUIET_S
        now_s = time.monotonic()
        return min(_BEAT_S, *(max(0.0, until_s - now_s) for until_s in self._arbiter.reserved().values()), _QUIET_S)

    # ---- events

    def _on_event(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:
            if fd == self._listener.fileno():
                self._accept()
            return
        if fd == connection.pidfd:
            self._drop(connection, "its process ended")
            return
        try:
            # Read one byte more than the largest message, so that a truncated oversized message is not accepted.
            data = connection.sock.recv(HELLO_BYTES + 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(connection, str(error))
            return
        if not data:
            self._drop(connection, "it closed the connection")
            return
        try:
            self._on_message(connection, data)
        except ProtocolError as error:
            self._refuse(connection, error.refusal, str(error))

    def _on_message(self, connection: _Connection, data: bytes) -> None:
        message = decode(data)
        now_s = time.monotonic()
        if connection.resource is None:
            if message.kind is Kind.HELLO:
                self._welcome(connection, data)
            elif message.kind is Kind.STATUS:
                self._send(connection, json.dumps(self.status(), separators=(",", ":")).encode())
            else:
                raise ProtocolError(Refusal.MALFORMED, f"{message.kind.name} before HELLO")
            return
        member = connection.member
        match message.kind:
            case Kind.REQUEST:
                grants = self._arbiter.request(member, message.request, now_s)
            case Kind.RELEASE:
                grants = self._arbiter.release(member, message.fence, message.request, now_s)
            case Kind.CANCEL:
                grants = self._arbiter.cancel(member, message.request, now_s)
            case _:
                raise ProtocolError(Refusal.MALFORMED, f"unexpected {message.kind.name}")
        self._announce(connection.resource, grants, now_s)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # The client has already gone, or descriptors ran out. Sleep, because the latter makes this loop spin.
            logger.warning("accept: %s", error)
            time.sleep(0.001)
            return
        sock.setblocking(False)
        peer = peer_of(sock)
        pidfd = open_pidfd(sock, peer.pid)
        connection = _Connection(sock, peer, pidfd, self._next_member, time.monotonic())
        self._next_member += 1
        for fd in (sock.fileno(), pidfd):
            if fd is not None:
                self._connections[fd] = connection
                self._epoll.register(fd, select.EPOLLIN)
        self._members[connection.member] = connection
        of_user = sum(other.peer.uid == peer.uid for other in self._members.values())
        if peer.uid != os.geteuid() and peer.uid not in self._settings.allowed_uids:
            self._refuse(connection, Refusal.NOT_ALLOWED, "not in the list of allowed users")
        elif len(self._members) > self._capacity or of_user > self._settings.connections_per_uid:
            self._refuse(connection, Refusal.FULL, "too many connections")

    def _welcome(self, connection: _Connection, data: bytes) -> None:
        hello = decode_hello(data)
        key = JobKey(connection.peer.uid, hello.job)
        jobs = self._arbiter.jobs_of(connection.peer.uid)
        if key not in jobs and len(jobs) >= self._settings.jobs_per_uid:
            raise ProtocolError(Refusal.FULL, "too many jobs")
        if hello.resource not in self._slots and len(self._slots) == RESOURCE_SLOTS:
            raise ProtocolError(Refusal.FULL, "too many resources")
        try:
            self._arbiter.join(connection.member, key, hello.resource, hello.role, hello.weight)
        except MismatchError as error:
            raise ProtocolError(Refusal.MISMATCH, str(error)) from None
        connection.resource, connection.job = hello.resource, hello.job
        now_s = time.monotonic()
        figures = self._figures.setdefault(hello.resource, ResourceFigures(now_s))
        figures.join(key, hello.role.name.lower(), now_s)
        slot = self._slots.setdefault(hello.resource, min(set(range(RESOURCE_SLOTS)) - set(self._slots.values())))
        welcome = Message(Kind.WELCOME, value=slot).encode()
        try:
            socket.send_fds(connection.sock, [welcome], [self._page.fd])
        except OSError as error:
            self._drop(connection, str(error))

    # ---- consequences

    def _announce(self, resource: str, grants: list[Grant], now_s: float) -> None:
        """Write the new state of a resource to the state page, then send the grants to the new holders."""
        # Write the page first: a client that receives a grant must find its fence there.
        self._page.show(self._slots[resource], self._arbiter.view(resource))
        self._grants += len(grants)
        for member, request, fence in grants:
            # A member is missing if sending an earlier grant to it failed; the arbiter has removed it as well.
            if (connection := self._members.get(member)) is not None:
                self._send(connection, Message(Kind.GRANT, 0, request, fence).encode())

        # Update figures last, off the grants' path. If a grant could not be sent, the resource may be gone.
        if resource in self._figures:
            self._figures[resource].change(now_s, self._arbiter.holding_job(resource), self._arbiter.queue(resource))

    def _send(self, connection: _Connection, data: bytes) -> None:
        if connection.member not in self._members:
            return  # dropped meanwhile; the arbiter has already taken its hold back
        try:
            connection.sock.send(data, socket.MSG_NOSIGNAL)
        except OSError as error:  # includes a full socket buffer: the client does not read
            self._drop(connection, f"cannot be told: {error}")

    def _refuse(self, connection: _Connection, refusal: Refusal, why: str) -> None:
        self._send(connection, Message(Kind.REFUSED, value=refusal).encode())
        self._drop(connection, f"refused, {refusal.name}: {why}")

    def _drop(self, connection: _Connection, why: str) -> None:
        if self._members.pop(connection.member, None) is None:
            return
        logger.info("pid %d of user %d leaves: %s", *connection.peer, why)
        for fd in (connection.sock.detach(), connection.pidfd):
            if fd is not None:
                del self._connections[fd]
                self._epoll.unregister(fd)
                self._to_close.append(fd)
        resource = connection.resource
        if resource is None:
            return
        now_s = time.monotonic()
        grants = self._arbiter.leave(connection.member, now_s)
        if resource not in self._arbiter.resources():
            self._page.show(self._slots.pop(resource), self._arbiter.view(resource))
            del self._figures[resource]
            return
        self._announce(resource, grants, now_s)
        others = self._members.values()
        gone = not any(other.resource == resource and other.key == connection.key for other in others)
        if gone and resource in self._figures:
            self._figures[resource].leave(connection.key)

    # ---- time

    def _tick(self, now_s: float) -> None:
        if self._arbiter.contended():
            self._page.beat()
            for resource, until_s in self._arbiter.reserved().items():
                if until_s <= now_s:
                    self._announce(resource, self._arbiter.end_reservation(resource, now_s), now_s)
            for resource in self._arbiter.overdue(now_s):
                self._evict(resource, now_s, "it held for too long")
            if now_s - self._stopped_check_s >= _STOPPED_CHECK_S:
                self._stopped_check_s = now_s
                for resource in self._arbiter.contended():
                    holders = [self._members[member] for member in self._arbiter.holders(resource)]
                    if any(is_stopped(holder.peer.pid) for holder in holders):
                        self._evict(resource, now_s, "its process is stopped")
        if now_s - self._quiet_check_s >= _QUIET_S:
            self._quiet_check_s = now_s
            if self._members:
                self._last_seen_s = now_s
            # Stop once our socket was deleted or replaced: a second broker would not know of our clients' holds.
            self.serving = self._is_ours() and now_s - self._last_seen_s < self._settings.idle_exit_s
            for connection in list(self._members.values()):
                if connection.resource is None and now_s - connection.opened_s > self._settings.hello_s:
                    self._drop(connection, "it never said HELLO")

    def _evict(self, resource: str, now_s: float, why: str) -> None:
        logger.warning("%s is taken from %s: %s", resource, self._arbiter.holding_job(resource), why)
        self._evictions += 1
        self._announce(resource, self._arbiter.evict(resource, now_s), now_s)

    def _is_ours(self) -> bool:
        """Whether the socket at the known path still belongs to this broker."""
        try:
            return self._directory.socket.stat().st_ino == self._inode
        except OSError:
            return False

    # ---- status

    def status(self) -> dict[str, Any]:
        """Return the state that `lease status` shows, ready for JSON."""
        arbiter = self._arbiter
        resources = []
        for name in arbiter.resources():
            holder = arbiter.holding_job(name)
            members = [
                {"job": c.job, "pid": c.peer.pid, "uid": c.peer.uid, "holds": c.member in arbiter.holders(name)}
                for c in self._members.values()
                if c.resource == name
            ]
            figures = self._figures[name]
            figures.change(time.monotonic(), holder, arbiter.queue(name))
            resources.append(
                {
                    "resource": name,
                    "holder": holder.name if holder is not None else None,
                    "fence": arbiter.view(name).fence,
                    "waiting": sorted(key.name for key in arbiter.queue(name)),
                    "members": members,
                    "jobs": figures.as_dicts(),
                }
            )
        return {"pid": os.getpid(), "grants": self._grants, "evictions": self._evictions, "resources": resources}
