"""Brokers of the lease as real processes, for benches that need neither a GPU nor torch.

The lease is imported as a package apart from `ddp_crossover`, as its broker does: a process without torch starts in a
tenth of a second.
"""

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "ddp_crossover" / "addons"))

from lease.client import GpuLease
from lease.client.connection import ask_status
from lease.client.reconnect import spawn_broker
from lease.directory import BrokerDirectory

__all__ = ["GpuLease", "start_broker"]

BROKER_START_S = 10.0


def start_broker(path: Path, stack: ExitStack) -> int:
    """A broker as the first client would start it; returns its process id. It is killed when the stack ends."""
    directory = BrokerDirectory(path)
    spawn_broker(directory)
    pid: int = json.loads(ask_status(directory, BROKER_START_S))["pid"]
    stack.callback(os.kill, pid, signal.SIGKILL)
    return pid
