"""The broker: one process per host that grants resources in turn to the processes connected to it.

It runs one thread and one epoll set. :class:`.arbiter.Arbiter` decides which job is granted what, and
:class:`.publisher.Publisher` tells the clients; this module handles messages, failures and the clock. No client may
stop the broker or delay other clients, whatever it sends or omits.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler

from ..directory import BrokerDirectory
from ..peer_process import is_stopped
from ..protocol import TAKES_OVER, Hello, Kind, Message, ProtocolError, Refusal, decode, decode_hello
from .arbiter import Arbiter, MismatchError
from .connections import Connection, Connections, Joined
from .holds import Limits
from .jobs import JobKey
from .publisher import Publisher

logger = logging.getLogger("ddp_crossover.lease")

_BEAT_S = 0.02  # while any job waits; by default, a client gives the broker up after 80 ms without a beat
_HOUSEKEEPING_S = 1.0
_STOPPED_CHECK_S = 0.25


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


class Broker:
    """The broker of a directory; :attr:`serving` is False if another broker already has the directory's lock.

    Raises:
        OSError, DirectoryError: the directory, its group or its socket cannot be used.
    """

    def __init__(self, directory: BrokerDirectory, settings: BrokerSettings) -> None:
        self._directory = directory
        self._settings = settings
        directory.make(settings.group)
        self._lock = directory.try_lock()
        self.serving = self._lock is not None
        if not self.serving:
            return
        listener, self._inode = directory.listen(settings.group)
        self._connections = Connections(listener)
        # Start fences at the nanoseconds since boot, which is above every fence of an earlier broker.
        self._arbiter = Arbiter(time.monotonic_ns(), settings.limits)
        self._publisher = Publisher(self._arbiter, self._connections, self._send_to_member)
        self._last_client_s = self._housekeeping_at_s = self._stopped_check_at_s = time.monotonic()

    def serve_forever(self) -> None:
        """Serve until the broker has been idle for ``idle_exit_s`` or its socket was removed or replaced."""
        gc.disable()  # a collection would delay grants; what leaves breaks its reference cycles itself
        logger.info("pid %d serves %s", os.getpid(), self._directory.socket)
        try:
            while self.serving:
                events = self._connections.poll(self._wait_s())
                self._read_notes()  # first: what clients say afterwards depends on it
                for fd in events:
                    self._on_event(fd)
                now_s = time.monotonic()
                if self._arbiter.contended():
                    self._watch_holds(now_s)
                if now_s - self._housekeeping_at_s >= _HOUSEKEEPING_S:
                    self._housekeeping_at_s = now_s
                    self._keep_house(now_s)
                self._connections.close_removed()
        finally:
            if self._owns_socket():
                self._directory.socket.unlink()
            logger.info("pid %d ends", os.getpid())

    def _wait_s(self) -> float:
        if not self._arbiter.contended():
            return _HOUSEKEEPING_S
        now_s = time.monotonic()
        return min([_BEAT_S, *(max(0.0, until_s - now_s) for until_s in self._arbiter.reserved().values())])

    # ---- messages

    def _read_notes(self) -> None:
        """End the holds that their holders have handed over."""
        for resource, member, fence in self._arbiter.may_be_handed_over():
            connection = self._connections.get(member)
            note = connection.note.read() if connection is not None and connection.note is not None else None
            if note is not None and note.fence == fence:
                now_s = time.monotonic()
                # The time of the hand-over decides whom a job is charged for, so not every time is believed.
                at_s = min(max(note.at_s, now_s - 2 * _BEAT_S), now_s)
                grants = self._arbiter.release(member, fence, 0, at_s, note.successor)
                self._publisher.publish(resource, grants, at_s)

    def _on_event(self, fd: int) -> None:
        connection = self._connections.find(fd)
        if connection is None:
            if self._connections.is_listener(fd):
                self._accept()
            return
        if fd == connection.pidfd:
            self._drop(connection, "its process ended")
            return
        try:
            data = connection.receive()
        except OSError as error:
            self._drop(connection, str(error))
            return
        if data is None:
            return
        if not data:
            self._drop(connection, "it closed the connection")
            return
        try:
            self._on_message(connection, data)
        except ProtocolError as error:
            self._refuse(connection, error.refusal, str(error))

    def _on_message(self, connection: Connection, data: bytes) -> None:
        message = decode(data)
        if connection.joined is None:
            self._on_first_message(connection, message, data)
            return
        now_s = time.monotonic()
        member = connection.member
        match message.kind:
            case Kind.REQUEST:
                grants = self._arbiter.request(member, message.request, now_s)
            case Kind.RELEASE:
                grants = self._arbiter.release(member, message.fence, message.request, now_s, message.successor)
            case Kind.CANCEL:
                grants = self._arbiter.cancel(member, message.request, now_s)
            case _:
                raise ProtocolError(Refusal.MALFORMED, f"a client that has joined must not send {message.kind.name}")
        self._publisher.publish(connection.joined.resource, grants, now_s)

    def _on_first_message(self, connection: Connection, message: Message, data: bytes) -> None:
        if message.kind is Kind.HELLO:
            self._welcome(connection, decode_hello(data), takes_over=message.value == TAKES_OVER != 0)
        elif message.kind is Kind.STATUS:
            self._send(connection, json.dumps(self._publisher.status(), separators=(",", ":")).encode())
        else:
            raise ProtocolError(Refusal.MALFORMED, f"a client must send HELLO before {message.kind.name}")

    def _accept(self) -> None:
        try:
            connection = self._connections.accept()
        except OSError as error:
            # The client has already gone, or descriptors ran out. Sleep, because the latter makes this loop spin.
            logger.warning("cannot accept a connection: %s", error)
            time.sleep(0.001)
            return
        uid = connection.peer.uid
        of_user = sum(other.peer.uid == uid for other in self._connections)
        if uid != os.geteuid() and uid not in self._settings.allowed_uids:
            self._refuse(connection, Refusal.NOT_ALLOWED, f"user {uid} is not in the list of allowed users")
        elif len(self._connections) > self._connections.capacity or of_user > self._settings.connections_per_uid:
            self._refuse(connection, Refusal.FULL, "there are too many connections")

    def _welcome(self, connection: Connection, hello: Hello, takes_over: bool) -> None:
        key = JobKey(connection.peer.uid, hello.job)
        jobs = self._arbiter.jobs_of(key.uid)
        if key not in jobs and len(jobs) >= self._settings.jobs_per_uid:
            raise ProtocolError(Refusal.FULL, "the user has too many jobs")
        if not self._publisher.has_room(hello.resource):
            raise ProtocolError(Refusal.FULL, "there are too many resources")
        try:
            self._arbiter.join(connection.member, key, hello.resource, hello.role, hello.weight)
        except MismatchError as error:
            raise ProtocolError(Refusal.MISMATCH, str(error)) from None
        connection.join(Joined(key, hello.resource))
        slot = self._publisher.add_job(hello.resource, key, hello.role, time.monotonic())
        welcome = Message(Kind.WELCOME, value=slot, request=connection.member).encode()
        try:
            if not takes_over:
                socket.send_fds(connection.sock, [welcome], [self._publisher.page.fd])
                return
            note = connection.open_note()
            try:
                fds = [self._publisher.page.fd, connection.make_alarm(), note.fd]
                socket.send_fds(connection.sock, [welcome], fds)
            finally:
                os.close(note.fd)
        except OSError as error:
            self._drop(connection, str(error))

    # ---- sending, and clients that are gone

    def _send_to_member(self, member: int, message: Message) -> None:
        if (connection := self._connections.get(member)) is not None:
            self._send(connection, message.encode())

    def _send(self, connection: Connection, data: bytes) -> None:
        if self._connections.get(connection.member) is None:
            return  # it was dropped because an earlier message could not be sent; the arbiter has ended its hold
        try:
            connection.sock.send(data, socket.MSG_NOSIGNAL)
        except OSError as error:  # includes a full socket buffer: the client does not read
            self._drop(connection, f"a message cannot be sent to it: {error}")

    def _refuse(self, connection: Connection, refusal: Refusal, why: str) -> None:
        self._send(connection, Message(Kind.REFUSED, value=refusal).encode())
        self._drop(connection, f"refused, {refusal.name}: {why}")

    def _drop(self, connection: Connection, why: str) -> None:
        if not self._connections.remove(connection):
            return
        logger.info("pid %d of user %d leaves: %s", *connection.peer, why)
        if connection.joined is None:
            return
        key, resource = connection.joined
        now_s = time.monotonic()
        grants = self._arbiter.leave(connection.member, now_s)
        if resource not in self._arbiter.resources():
            self._publisher.remove_resource(resource)
            return
        self._publisher.publish(resource, grants, now_s)
        if not any(other.joined == connection.joined for other in self._connections):
            self._publisher.remove_job(resource, key)

    # ---- time

    def _watch_holds(self, now_s: float) -> None:
        """While a job waits: beat, end reservations that are over, and evict holders that are late or stopped."""
        self._publisher.page.beat()
        self._publisher.renew_promises()
        for resource, until_s in self._arbiter.reserved().items():
            if until_s <= now_s:
                self._publisher.publish(resource, self._arbiter.end_reservation(resource, now_s), now_s)
        for resource in self._arbiter.overdue(now_s):
            self._evict(resource, now_s, "the hold has reached its limit")
        if now_s - self._stopped_check_at_s >= _STOPPED_CHECK_S:
            self._stopped_check_at_s = now_s
            for resource in self._arbiter.contended():
                holders = [self._connections.get(member) for member in self._arbiter.holders(resource)]
                if any(holder is not None and is_stopped(holder.peer.pid) for holder in holders):
                    self._evict(resource, now_s, "the holder's process is stopped")

    def _keep_house(self, now_s: float) -> None:
        """Decide whether to go on serving, and drop connections that never sent HELLO."""
        if self._connections:
            self._last_client_s = now_s
        # Stop once our socket was deleted or replaced: a second broker would not know of our clients' holds.
        self.serving = self._owns_socket() and now_s - self._last_client_s < self._settings.idle_exit_s
        for connection in self._connections:
            if connection.joined is None and now_s - connection.opened_s > self._settings.hello_s:
                self._drop(connection, f"it sent no HELLO within {self._settings.hello_s} s")

    def _evict(self, resource: str, now_s: float, why: str) -> None:
        logger.warning("%s is taken from %s: %s", resource, self._arbiter.holding_job(resource), why)
        self._publisher.count_eviction()
        self._publisher.publish(resource, self._arbiter.evict(resource, now_s), now_s)

    def _owns_socket(self) -> bool:
        """Whether the socket at the known path still belongs to this broker."""
        try:
            return self._directory.socket.stat().st_ino == self._inode
        except OSError:
            return False


def main(path: str) -> None:
    """The process that a client starts, and that outlives it.

    It listens in the directory ``path``, then serves in a forked child. The parent exits, which shows that it listens.
    """
    directory = BrokerDirectory(path)
    broker = Broker(directory, BrokerSettings())
    if not broker.serving or os.fork():
        os._exit(0)
    # Undo the starter's CPU affinity: it may be pinned to one core, which its training needs.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.umask(0o077)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    log_to_file(directory)
    try:
        broker.serve_forever()
    except Exception:
        logger.exception("the broker ends because of an error")  # stderr goes to /dev/null
        raise


def log_to_file(directory: BrokerDirectory) -> None:
    """Send the broker's log to its directory, in two files of at most 64 KiB."""
    logging.raiseExceptions = False  # ignore logging errors, such as a full disk
    handler = RotatingFileHandler(directory.log, maxBytes=1 << 16, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
