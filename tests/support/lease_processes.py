"""Real brokers and clients, one process each, with hard time limits. Nothing outlives `LeaseProcesses`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ddp_crossover
from ddp_crossover.addons.lease.client.connection import ask, ask_status
from ddp_crossover.addons.lease.directory import BrokerDirectory
from ddp_crossover.addons.lease.protocol import HELLO_BYTES, Hello, Kind, Message, Role, decode
from ddp_crossover.addons.lease.shared_memory import PageReader

TIMEOUT_S = 60.0
HERE = Path(__file__).parent
PACKAGE = str(Path(ddp_crossover.__file__).parent / "addons")


class Actor:
    """A process with a lease. `actor.call("acquire")`, or `start` and, later, `result`."""

    def __init__(self, directory: Path, job: str, wrapper: list[str], **options: Any) -> None:
        # Patient: a broker may be slow where many tests share few cores.
        defaults = {"resource": "cpu:0", "directory": str(directory), "spawn_broker": False, "max_stall_s": 10.0}
        options = {**defaults, "job": job, **options}
        arguments = [sys.executable, "-I", "-S", str(HERE / "lease_actor.py"), PACKAGE, json.dumps(options)]
        self.process = subprocess.Popen(
            [*wrapper, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.pid = self.process.pid
        self._children: list[int] = []

    def start(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def has_answered(self, timeout_s: float = 0.0) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], timeout_s)[0])

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        assert self.process.stdout is not None
        assert self.has_answered(timeout_s), f"no answer within {timeout_s} s"
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(f"the process ended:\n{self.process.stderr.read().decode()}")
        answer = json.loads(line)
        if isinstance(answer["result"], dict) and "pid" in answer["result"]:
            self._children.append(answer["result"]["pid"])
        return answer["result"]

    def call(self, name: str, *arguments: Any) -> Any:
        self.start(name, *arguments)
        return self.result()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        for child in self._children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class RawClient:
    """A connection that says exactly what the test wants it to say."""

    def __init__(self, directory: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Before the timeout: with one, connect() fails at once where the queue of the broker is full.
        self.sock.connect(str(directory / "broker.sock"))
        self.sock.settimeout(TIMEOUT_S)

    def hello(self, job: str, resource: str = "cpu:0", role: Role = Role.PEER, weight: float = 1.0) -> Message:
        """Introduce itself; the answer. `page` is there afterwards if that was WELCOME."""
        data, fds = ask(self.sock, Hello(job, resource, role, weight).encode(), HELLO_BYTES)
        message = decode(data)
        for fd in fds:
            self.page = PageReader(fd, message.value)
            os.close(fd)
        return message

    def send(self, kind: Kind, *, request: int = 0, fence: int = 0) -> None:
        self.sock.send(Message(kind, request=request, fence=fence).encode())

    def receive(self, timeout_s: float = TIMEOUT_S) -> Message:
        self.sock.settimeout(timeout_s)
        return decode(self.sock.recv(HELLO_BYTES))

    def hears_nothing(self, seconds: float = 0.1) -> bool:
        return not select.select([self.sock], [], [], seconds)[0]

    def is_closed(self) -> bool:
        """Whether the broker has ended the connection, perhaps after a last word."""
        self.sock.settimeout(TIMEOUT_S)
        with suppress(ConnectionResetError):
            while self.sock.recv(HELLO_BYTES):
                pass
        return True

    def end(self) -> None:
        self.sock.close()


class LeaseProcesses:
    """Makes brokers and clients that meet in `directory`, and ends them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._to_end: list[Actor | RawClient] = []
        self._brokers: list[subprocess.Popen[bytes]] = []

    def broker(self, *, limits: dict[str, float] | None = None, **settings: Any) -> subprocess.Popen[bytes]:
        """A broker that listens."""
        broker = self.start_broker(limits=limits, **settings)
        assert broker.stdout is not None
        assert broker.stdout.readline() == b"serving\n"
        return broker

    def start_broker(self, *, limits: dict[str, float] | None = None, **settings: Any) -> subprocess.Popen[bytes]:
        # What is under test must end a hold, not time.
        limits = {"hold_s": 1000.0, "filler_s": 1000.0} | (limits or {})
        arguments = [PACKAGE, str(self.directory), json.dumps(settings), json.dumps(limits)]
        broker = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "lease_broker.py"), *arguments], stdout=subprocess.PIPE
        )
        self._brokers.append(broker)
        return broker

    def actor(self, job: str, *, wrapper: tuple[str, ...] = (), connect: bool = True, **options: Any) -> Actor:
        """A client process, by default one that is connected."""
        actor = Actor(self.directory, job, list(wrapper), **options)
        self._to_end.append(actor)
        if connect:
            assert actor.call("wait_until_connected", TIMEOUT_S)
        return actor

    def raw(self) -> RawClient:
        client = RawClient(self.directory)
        self._to_end.append(client)
        return client

    def status(self) -> dict[str, Any]:
        return json.loads(ask_status(BrokerDirectory(self.directory), TIMEOUT_S))

    def end(self) -> None:
        spawned = self._spawned_broker()
        for client in self._to_end:
            client.end()
        for broker in self._brokers:
            broker.kill()
            broker.wait()
            assert broker.stdout is not None
            broker.stdout.close()
        if spawned is not None:
            with suppress(ProcessLookupError):
                os.kill(spawned, signal.SIGKILL)

    def _spawned_broker(self) -> int | None:
        """The pid of a broker that a client has started."""
        try:
            pid = self.status()["pid"]
        except Exception:
            return None
        return None if pid in [broker.pid for broker in self._brokers] else pid


def eventually(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Wait until `condition()` is true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not true after {timeout_s} s"
        time.sleep(0.005)
    return value
