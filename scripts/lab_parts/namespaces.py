"""Network namespaces of the lab: their names, the processes in them, and those that a killed lab left behind.

A name holds its owner: `ddplab.<pid>.<start time of pid>.<lab>.<part>`. A pid alone may have been
given to another process by now; pid and start time together have not.
"""

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from lab_parts.results import LabError
from lab_parts.signals import ENDING_SIGNALS, uninterrupted

FAMILY = "ddplab"
# Where `ip netns` keeps its names (iproute2, ip-netns(8)).
NETNS_DIR = Path("/run/netns")
# A killed process ends within milliseconds, unless the kernel is busy with it.
KILL_TIMEOUT_S = 5.0


@uninterrupted
def call(*command: str, given: str = "") -> None:
    """Run a command of the system, with this as its input; raises LabError with its error message when it fails."""
    # A Ctrl-C must not reach the command, which may be half of a clean-up: it runs in a session of its own, and with
    # blocked signals until it is there.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise LabError(f"`{shlex.join(command)}` failed: {said}")


def new_prefix() -> str:
    """Start of all names of one lab of this process."""
    return f"{FAMILY}.{os.getpid()}.{start_ticks(os.getpid())}.{secrets.token_hex(3)}."


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it has ended (zombies have)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name, which may hold spaces and brackets: proc_pid_stat(5).
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def existing(prefix: str) -> list[str]:
    """Names of the existing namespaces of one lab, or of the whole family."""
    return sorted(path.name for path in NETNS_DIR.glob(f"{prefix}*"))


def leftovers() -> list[str]:
    """Names of the namespaces whose owner has ended without removing them."""
    return [name for name in existing(f"{FAMILY}.") if not _owner_lives(name)]


def _owner_lives(name: str) -> bool:
    _, pid, ticks, *_ = name.split(".")
    return start_ticks(int(pid)) == int(ticks)


def remove(names: Iterable[str]) -> None:
    """End every process in these namespaces and delete them. Those that are deleted already are skipped."""
    names = list(names)
    kill_processes(names)
    for name in names:
        try:
            call("ip", "netns", "delete", name)
        except LabError:
            # Two labs that start at once may both find the same leftovers.
            if (NETNS_DIR / name).exists():
                raise


@uninterrupted
def remove_all(prefix: str) -> None:
    """Remove all namespaces whose names begin like this."""
    remove(existing(prefix))


def kill_processes(names: Iterable[str]) -> None:
    """SIGKILL all processes in these namespaces, also those that left their process group, and wait for their end."""
    names = list(names)
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while pids := processes(names):
        if time.monotonic() > deadline_s:
            raise LabError(f"processes {pids} of the lab do not end; the kernel holds them")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def processes(names: Iterable[str]) -> list[int]:
    """Pids of all processes in these namespaces."""
    inside = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inside.add(_identity(NETNS_DIR / name))
    found = []
    for entry in os.listdir("/proc") if inside else ():
        # A process may end while we look; a zombie has no namespace any more.
        with contextlib.suppress(OSError):
            if entry.isdigit() and _identity(Path(f"/proc/{entry}/ns/net")) in inside:
                found.append(int(entry))
    return found


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
