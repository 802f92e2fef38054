"""Brokers and clients of the lease as real processes, for benches that need neither a GPU nor torch.

Clients are programs of their own. They import the lease as a package apart from `ddp_crossover`, as its broker does,
because a process without torch starts in a tenth of a second. They run with `-I -S`, so they must append
`ddp_crossover/` to `sys.path` themselves.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

LEASE_PARENT = Path(__file__).resolve().parents[2] / "ddp_crossover"
sys.path.append(str(LEASE_PARENT))

from lease.client import GpuLease  # noqa: E402
from lease.client.connection import ask_status  # noqa: E402
from lease.client.reconnect import spawn_broker  # noqa: E402
from lease.directory import BrokerDirectory  # noqa: E402

__all__ = ["BrokerDirectory", "GpuLease", "Program", "broker_pid", "start_broker"]

BROKER_START_S = 10.0


def start_broker(path: Path, stack: ExitStack) -> BrokerDirectory:
    """A broker as the first client would start it; it is killed when the stack ends."""
    directory = BrokerDirectory(path)
    spawn_broker(directory)
    stack.callback(os.kill, broker_pid(directory), signal.SIGKILL)
    return directory


def broker_pid(directory: BrokerDirectory) -> int:
    """The process id of a broker that runs."""
    pid: int = json.loads(ask_status(directory, BROKER_START_S))["pid"]
    return pid


class Program:
    """A Python program that is told what to do in lines of JSON, and answers in such lines; "ready" is the first.

    It is killed, with all processes that it has forked, when the stack ends.

    Args:
        stack: what the program lives in.
        script: its file.
        arguments: its arguments, given as one of JSON.
    """

    def __init__(self, stack: ExitStack, script: Path, arguments: Any) -> None:
        command = [sys.executable, "-I", "-S", str(script), json.dumps(arguments)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = stack.enter_context(subprocess.Popen(command, start_new_session=True, **pipes))
        stack.callback(os.killpg, self.process.pid, signal.SIGKILL)

    def wait_until_ready(self) -> None:
        """Wait for the first line. How long that takes depends on the load of the machine."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != "ready\n":
            raise RuntimeError(f"{self.process.args} did not start: it wrote {line!r}")

    def tell(self, *words: Any) -> None:
        """Send one line."""
        assert self.process.stdin is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """Receive one line."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())
