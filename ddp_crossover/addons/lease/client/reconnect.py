"""Keeps a client connected from a separate thread, so that the training thread never waits for a connection."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from ..directory import BrokerDirectory
from ..protocol import Hello
from .connection import BrokerConnection, open_connection

_HANDSHAKE_S = 0.5
_FIRST_DELAY_S = 0.02
_LAST_DELAY_S = 2.0
_SLOW_DELAY_S = 1.0  # by default, each try at a slow broker stalls training for up to 0.1 s

# Run without site-packages and with the standard library first on the path. `lease` is then a top-level package, whose
# import does not load torch. See the docstring of the package.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from lease.broker.server import main; main(sys.argv[2])"
_START_S = 10.0


class Reconnector:
    """Owns the current connection, if any, and reconnects after it is lost.

    Attributes:
        connection: the current connection, None while there is none. Its thread replaces it at any time, so read it
            once and use what was read.
        connected: set while there is a connection.
        why_disconnected: the reason why there was no connection last.

    Args:
        directory: directory of the broker.
        hello: identity to send on each new connection.
        receive_timeout_s: seconds that a connection's ``receive`` waits.
        spawn: start a broker if none is running.
    """

    def __init__(self, directory: BrokerDirectory, hello: Hello, receive_timeout_s: float, spawn: bool) -> None:
        self.connection: BrokerConnection | None = None
        self.connected = threading.Event()
        self.why_disconnected = "no lease: not connected to a broker"
        self._directory = directory
        self._hello = hello
        self._receive_timeout_s = receive_timeout_s
        self._spawn = spawn
        self._delay_s = _FIRST_DELAY_S
        self._changing = threading.RLock()  # reentrant: a signal handler may need it while this thread holds it
        self._stopping = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._stay_connected, name="ddp_crossover-lease", daemon=True)
        self._thread.start()

    def disconnect(self, connection: BrokerConnection, slow: bool = False) -> None:
        """Shut down a failed ``connection``, which the broker treats as a release; if ``slow``, delay the next try."""
        if slow:
            self._delay_s = _SLOW_DELAY_S
        with self._changing:
            if self.connection is connection:
                self.connection = None
                self.connected.clear()
        connection.shut_down()

    def stop(self) -> None:
        """End the connection and the thread. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._stopping.set()
        connection = self.connection
        if connection is not None:
            self.disconnect(connection)
        self._thread.join(_HANDSHAKE_S)

    def forget_in_child(self) -> None:
        """Drop the connection in a forked child, since it belongs to the parent."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close_in_child()

    def _stay_connected(self) -> None:
        while not self._stopping.is_set():
            try:
                connection = self._connect()
            except Exception as error:  # on any error, the job continues unleased
                self.why_disconnected = f"no lease: {error}"
                self._stopping.wait(self._delay_s)
                self._delay_s = min(2 * self._delay_s, _LAST_DELAY_S)
                continue
            self._delay_s = _FIRST_DELAY_S
            with self._changing:
                self.connection = connection
                self.connected.set()
            if self._stopping.is_set():  # stop() may have run before self.connection was set
                self.disconnect(connection)
            connection.wait_until_lost()
            self.disconnect(connection)
            del connection  # the last reference closes it
            self._stopping.wait(self._delay_s)

    def _connect(self) -> BrokerConnection:
        try:
            return open_connection(self._directory, self._hello, _HANDSHAKE_S, self._receive_timeout_s)
        except (FileNotFoundError, ConnectionRefusedError):
            if not self._spawn:
                raise
        self._directory.make()
        spawn_broker(self._directory)
        return open_connection(self._directory, self._hello, _HANDSHAKE_S, self._receive_timeout_s)


def spawn_broker(directory: BrokerDirectory) -> None:
    """Start a broker unless one is running, and return once it listens, after about 0.1 s.

    It outlives the job that starts it. What its process does is in :func:`..broker.server.main`.

    Raises ``OSError``, ``subprocess.SubprocessError``.
    """
    parent_of_lease = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, str(parent_of_lease), str(directory.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    try:
        process.wait(_START_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
