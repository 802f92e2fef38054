"""The commands of one run, one per host: their output and their exit codes, read on the caller's thread.

Knows processes and pipes, and nothing of networks.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from lab_parts.results import HostResult
from lab_parts.signals import uninterrupted

# Called with the rank, "stdout" or "stderr", and a line without its end.
OnLine = Callable[[int, str, str], None]

# How long the others may go on after one host has failed: often enough to say what they saw of it.
FAILURE_GRACE_S = 3.0
# From SIGTERM to SIGKILL.
END_GRACE_S = 2.0


class HostCommand:
    """One command, in a session of its own so that it can be ended with all of its children."""

    def __init__(self, rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.rank = rank
        self.seconds = 0.0
        self.output = {"stdout": bytearray(), "stderr": bytearray()}
        self._shown_bytes = {"stdout": 0, "stderr": 0}
        self._start_s = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    def note_end(self) -> None:
        self.process.wait()
        self.seconds = time.monotonic() - self._start_s

    def add_output(self, stream: str, data: bytes, on_line: OnLine | None) -> None:
        """Keep new output, and call `on_line` for each complete line; empty data is the end, and ends the last line."""
        text = self.output[stream]
        text += data
        end = text.rfind(b"\n") + 1 if data else len(text)
        lines = bytes(text[self._shown_bytes[stream] : end])
        self._shown_bytes[stream] = max(end, self._shown_bytes[stream])
        if on_line is not None:
            for line in lines.splitlines():
                on_line(self.rank, stream, line.decode(errors="replace"))

    def send(self, signal_number: int) -> None:
        """Send a signal to the whole process group, if its leader still holds the group's id."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal_number)

    def result(self) -> HostResult:
        stdout, stderr = (self.output[stream].decode(errors="replace") for stream in ("stdout", "stderr"))
        return HostResult(self.rank, self.process.returncode, stdout, stderr, self.seconds)

    def close(self) -> None:
        os.close(self.pidfd)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


class Run:
    """All commands of one run. `failed` is the host that ended first with something other than 0."""

    def __init__(self, on_line: OnLine | None) -> None:
        self.hosts: list[HostCommand] = []
        self.failed: HostCommand | None = None
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()

    @uninterrupted  # a command that has started must be in the list of those to end
    def start(self, rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        host = HostCommand(rank, command, env)
        self.hosts.append(host)
        for source, what in ((host.process.stdout, "stdout"), (host.process.stderr, "stderr"), (host.pidfd, "end")):
            assert source is not None
            self._selector.register(source, selectors.EVENT_READ, (host, what))

    @property
    def ended(self) -> bool:
        return all(host.ended for host in self.hosts)

    def follow(self, limit_s: float, until: Callable[[], bool]) -> None:
        """Read output and note ends until a condition holds, all pipes are closed, or the time is over."""
        deadline_s = time.monotonic() + limit_s
        while self._selector.get_map() and not until():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            for key, _ in self._selector.select(left_s):
                self._take(key)

    def follow_to_the_end(self, limit_s: float) -> bool:
        """Read output until all have ended, or one has failed and a little longer; False if that takes too long."""
        self.follow(limit_s, until=lambda: self.ended or self.failed is not None)
        if self.failed is not None:
            self.follow(FAILURE_GRACE_S, until=lambda: self.ended)
        return self.ended or self.failed is not None

    def _take(self, key: selectors.SelectorKey) -> None:
        host, what = key.data
        if what == "end":
            self._selector.unregister(key.fileobj)
            host.note_end()
            if host.process.returncode and self.failed is None:
                self.failed = host
            return
        data = os.read(key.fd, 1 << 16)
        if not data:
            self._selector.unregister(key.fileobj)
        host.add_output(what, data, self._on_line)

    @uninterrupted
    def end(self, kill_others: Callable[[], None] = lambda: None) -> None:
        """End the commands that still run and what they have left behind, and read the rest of their output.

        Args:
            kill_others: kills what has left the commands' process groups.
        """
        try:
            self.send(signal.SIGTERM)
            self.follow(END_GRACE_S, until=lambda: self.ended)
        finally:
            self.send(signal.SIGKILL)
            kill_others()
            self._reap()
        try:
            # All writers have ended, so this reads the rest from the pipes and returns.
            self.follow(END_GRACE_S, until=lambda: False)
        finally:
            self._close()

    def send(self, signal_number: int) -> None:
        """Send a signal to all commands that still run."""
        for host in self.hosts:
            host.send(signal_number)

    def _reap(self) -> None:
        for host in self.hosts:
            if not host.ended:
                host.note_end()

    def _close(self) -> None:
        self._selector.close()
        for host in self.hosts:
            host.close()
