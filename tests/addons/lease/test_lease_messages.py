"""Messages that are late, doubled, cut, too long or nonsense, on either side."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover.addons.lease.client import GpuLease
from ddp_crossover.addons.lease.client.connection import ask
from ddp_crossover.addons.lease.protocol import (
    HELLO_BYTES,
    MESSAGE_BYTES,
    Hello,
    Kind,
    Message,
    ProtocolError,
    Refusal,
    Role,
    decode,
    decode_hello,
)
from ddp_crossover.addons.lease.shared_memory import PageWriter, ResourceState
from lease_processes import LeaseProcesses, RawClient, eventually

HELLO = Hello("job", "cpu:0", Role.PEER, 1.0).encode()
REQUEST = Message(Kind.REQUEST, request=1).encode()

BAD_OPENINGS = {
    "one byte": b"x",
    "cut short": HELLO[:-1],
    "only the head": HELLO[:MESSAGE_BYTES],
    "too long": HELLO + b"x",
    "far too long": HELLO * 100,
    "no magic": b"\0" * HELLO_BYTES,
    "noise": os.urandom(HELLO_BYTES),
    "another version": HELLO[:2] + b"\x63" + HELLO[3:],
    "unknown kind": HELLO[:3] + b"\x63" + HELLO[4:],
    "request before hello": REQUEST,
    "weight that is no number": Hello("job", "cpu:0", Role.PEER, float("nan")).encode(),
    "weight zero": Hello("job", "cpu:0", Role.PEER, 0.0).encode(),
    "no job": Hello("", "cpu:0", Role.PEER, 1.0).encode(),
    "unprintable job": Hello("a\nb", "cpu:0", Role.PEER, 1.0).encode(),
    "job that is no text": HELLO.replace(b"job", b"\xff\xfe\xfd"),
    "no such role": HELLO[:MESSAGE_BYTES] + b"\x09" + HELLO[MESSAGE_BYTES + 1 :],
}


@given(st.binary(max_size=2 * HELLO_BYTES) | st.binary(max_size=HELLO_BYTES).map(lambda tail: HELLO[:4] + tail))
def test_bytes_are_a_message_or_refused(data: bytes) -> None:
    with suppress(ProtocolError):
        if decode(data).kind is Kind.HELLO:
            decode_hello(data)


def test_bad_openings_end_their_own_connection_only(processes: LeaseProcesses) -> None:
    processes.broker()
    holder = processes.actor("holder")
    holder.call("acquire")
    for name, data in BAD_OPENINGS.items():
        client = processes.raw()
        client.sock.send(data)
        answer = client.receive()
        assert answer.kind is Kind.REFUSED, name
        assert Refusal(answer.value) is (Refusal.VERSION if name == "another version" else Refusal.MALFORMED), name
        assert client.is_closed()
        client.end()
    assert holder.call("get", "holding")
    [resource] = processes.status()["resources"]
    assert [member["job"] for member in resource["members"]] == ["holder"]


def test_a_bad_message_ends_the_hold_of_its_connection(processes: LeaseProcesses) -> None:
    processes.broker()
    for index, data in enumerate((HELLO, REQUEST[:-1], REQUEST + b"x", Message(Kind.GRANT).encode(), b"\0" * 4096)):
        client = processes.raw()
        client.hello(f"job {index}")
        client.send(Kind.REQUEST, request=1)
        assert client.receive().kind is Kind.GRANT
        client.sock.send(data)
        assert client.is_closed()
    assert processes.actor("other").call("acquire")


def test_a_client_that_does_not_read_is_dropped(processes: LeaseProcesses) -> None:
    processes.broker()
    other, client = processes.actor("other"), processes.raw()
    client.hello("job")
    client.sock.settimeout(20)
    with suppress(BrokenPipeError, ConnectionResetError):
        for request in range(1, 100_000):
            client.send(Kind.REQUEST, request=request)  # each is answered with a grant
        raise AssertionError("the broker never lost patience")
    assert other.call("acquire")


def test_a_flood_of_connections_disturbs_nobody_who_is_there(processes: LeaseProcesses) -> None:
    broker = processes.broker(connections_per_uid=20, hello_s=0.2)
    actors = [processes.actor("a"), processes.actor("b")]
    flood: list[RawClient] = []
    for index in range(200):
        flood.append(processes.raw())
        if index % 20 == 0:
            for actor in actors:
                assert actor.call("hold_for", 0.0)["leased"]
    assert broker.poll() is None
    # Whoever has not said HELLO is shown out after a while, and there is room again.
    assert processes.actor("late").call("acquire")


@pytest.mark.parametrize(
    ("limit", "jobs", "one_more"), [({"connections_per_uid": 3}, "aaa", "a"), ({"jobs_per_uid": 2}, "aab", "c")]
)
def test_connections_and_jobs_of_one_user_are_limited(
    processes: LeaseProcesses, limit: dict[str, int], jobs: str, one_more: str
) -> None:
    processes.broker(**limit)
    assert [processes.raw().hello(job).kind for job in jobs] == [Kind.WELCOME] * 3
    refusal = processes.raw().hello(one_more)
    assert (refusal.kind, refusal.value) == (Kind.REFUSED, Refusal.FULL)


def test_resources_are_limited_and_their_places_used_again(processes: LeaseProcesses) -> None:
    processes.broker()
    clients = [processes.raw() for _ in range(64)]
    answers = [client.hello("job", f"cpu:{index}") for index, client in enumerate(clients)]
    assert [answer.kind for answer in answers] == [Kind.WELCOME] * 63 + [Kind.REFUSED]
    assert sorted(answer.value for answer in answers[:63]) == list(range(63))
    clients[5].end()
    again = eventually(lambda: (message := processes.raw().hello("job", "cpu:99")).kind is Kind.WELCOME and [message])
    assert again[0].value == answers[5].value


# ---- the same from a broker that misbehaves


class FakeBroker:
    """A socket that a real client connects to; the test says what it answers."""

    def __init__(self, directory: Path) -> None:
        self.page = PageWriter()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(directory / "broker.sock"))
        self._listener.listen()
        self.client: socket.socket | None = None

    def welcome(self) -> None:
        self._listener.settimeout(20)
        self.client, _ = self._listener.accept()
        self.client.settimeout(20)
        self.client.recv(HELLO_BYTES)
        socket.send_fds(self.client, [Message(Kind.WELCOME).encode()], [self.page.fd])

    def receive(self) -> Message:
        assert self.client is not None
        return decode(self.client.recv(HELLO_BYTES))

    def send(self, data: bytes) -> None:
        assert self.client is not None
        self.client.send(data)

    def grant(self, request: int, fence: int) -> None:
        self.page.show(0, ResourceState(fence=fence))
        self.send(Message(Kind.GRANT, request=request, fence=fence).encode())

    def end(self) -> None:
        self._listener.close()
        if self.client is not None:
            self.client.close()
        os.close(self.page.fd)


@pytest.fixture
def fake(lease_directory: Path, make_lease: Callable[..., GpuLease]) -> Iterator[tuple[FakeBroker, GpuLease]]:
    broker = FakeBroker(lease_directory)
    lease = make_lease(connects=False, max_wait_s=0.3)
    broker.welcome()
    assert lease.wait_until_connected(20)
    yield broker, lease
    broker.end()


def _in_thread(lease: GpuLease) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(lease.acquire()))
    thread.start()
    return thread, answers


def test_a_late_grant_is_not_taken_for_the_next(fake: tuple[FakeBroker, GpuLease]) -> None:
    broker, lease = fake
    thread, answers = _in_thread(lease)
    first = broker.receive()
    while thread.is_alive():  # alive, but without a grant
        broker.page.beat()
        time.sleep(0.01)
    assert answers == [False]
    assert broker.receive() == Message(Kind.CANCEL, request=first.request)
    broker.grant(first.request, 7)
    thread, answers = _in_thread(lease)
    second = broker.receive()
    assert second.request > first.request
    broker.grant(second.request, 8)
    broker.grant(second.request, 8)
    thread.join(20)
    assert answers == [True]
    assert lease.fence == 8
    lease.release()
    assert broker.receive()[:4] == Message(Kind.RELEASE, fence=8)[:4]


def test_a_grant_that_came_too_late_to_hold_is_asked_for_again(fake: tuple[FakeBroker, GpuLease]) -> None:
    """As after SIGCONT, for one that was stopped while it waited."""
    broker, lease = fake
    thread, answers = _in_thread(lease)
    first = broker.receive()
    broker.page.show(0, ResourceState(fence=8))  # another's
    broker.send(Message(Kind.GRANT, request=first.request, fence=7).encode())
    second = broker.receive()
    assert (second.kind, second.request) == (Kind.REQUEST, first.request + 1)
    broker.grant(second.request, 9)
    thread.join(20)
    assert answers == [True]
    assert lease.fence == 9


@pytest.mark.parametrize("nonsense", [b"x", b"\0" * MESSAGE_BYTES, b"x" * 1000], ids=["short", "zeros", "long"])
def test_a_broker_that_talks_nonsense_is_left(fake: tuple[FakeBroker, GpuLease], nonsense: bytes) -> None:
    broker, lease = fake
    thread, answers = _in_thread(lease)
    broker.receive()
    broker.send(nonsense)
    thread.join(20)
    assert answers == [False]
    assert not lease.connected  # it has not just waited for long enough


def test_the_layout_of_messages_is_fixed() -> None:
    """Brokers outlive upgrades of the package: whoever changes this raises the version."""
    assert Message(Kind.RELEASE, 1, 2, 3).encode() == struct.pack("<HBBIQQQ", 0xDDC0, 2, 6, 1, 2, 3, 0)
    assert (MESSAGE_BYTES, HELLO_BYTES) == (32, 240)


@pytest.mark.parametrize("first", ["the refusal", "our message"])
def test_a_refusal_is_heard_whichever_comes_first(lease_directory: Path, first: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(lease_directory / "broker.sock"))
        listener.listen()
        accepted = threading.Event()

        def refuse() -> None:
            broker, _ = listener.accept()
            if first == "our message":
                select.select([broker], [], [])  # there, and not read
            broker.send(Message(Kind.REFUSED, value=Refusal.FULL).encode())
            broker.close()
            accepted.set()

        threading.Thread(target=refuse, daemon=True).start()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with sock:
            sock.settimeout(20)
            sock.connect(str(lease_directory / "broker.sock"))
            if first == "the refusal":
                assert accepted.wait(20)
            data, fds = ask(sock, HELLO, MESSAGE_BYTES)
        assert (decode(data), fds) == (Message(Kind.REFUSED, value=Refusal.FULL), [])
