"""Who may connect, and what a client may not do to others."""

from __future__ import annotations

import fcntl
import grp
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_crossover.addons.lease.client import GpuLease
from ddp_crossover.addons.lease.directory import DIRECTORY_VARIABLE, BrokerDirectory, DirectoryError
from ddp_crossover.addons.lease.protocol import HELLO_BYTES, Hello, Role
from ddp_crossover.addons.lease.shared_memory import PageReader
from lease_processes import HERE, PACKAGE, TIMEOUT_S, LeaseProcesses, eventually

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
STRANGER = 54321


@pytest.fixture
def own_place(lease_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that a user gets who names none."""
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(lease_directory))
    return lease_directory / "ddp_crossover"


def test_the_directory_is_closed_to_others(own_place: Path) -> None:
    directory = BrokerDirectory()
    directory.make()
    assert directory.path == own_place
    assert own_place.stat().st_mode & 0o777 == 0o700


def test_a_runtime_directory_of_another_user_is_not_taken(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    assert BrokerDirectory().path == Path(f"/tmp/ddp_crossover-{os.geteuid()}")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_an_open_directory_is_refused(own_place: Path, mode: int) -> None:
    own_place.mkdir()
    own_place.chmod(mode)
    with pytest.raises(DirectoryError, match="open to other users"):
        BrokerDirectory().make()
    with pytest.raises(DirectoryError, match="open to other users"):
        BrokerDirectory().owner()


def test_a_link_in_its_place_is_refused(own_place: Path, tmp_path: Path) -> None:
    own_place.symlink_to(tmp_path)
    with pytest.raises(DirectoryError, match="not a directory"):
        BrokerDirectory().make()


def _refuses_what_is_of_another_user(lease: GpuLease) -> None:
    eventually(lambda: not lease.acquire() and "another user" in str(lease.stats().unleased))


@needs_root
def test_a_directory_of_another_user_is_not_looked_into_and_means_no_lease(
    own_place: Path, make_lease: Callable[..., GpuLease]
) -> None:
    own_place.mkdir(mode=0o700)
    os.chown(own_place, STRANGER, -1)
    with pytest.raises(DirectoryError, match="another user"):
        BrokerDirectory().owner()
    _refuses_what_is_of_another_user(make_lease(connects=False, directory=None, spawn_broker=True))
    assert not list(own_place.iterdir())


@needs_root
def test_a_socket_of_another_user_is_not_trusted(
    processes: LeaseProcesses, lease_directory: Path, make_lease: Callable[..., GpuLease]
) -> None:
    processes.broker()
    os.chown(lease_directory, STRANGER, -1)
    _refuses_what_is_of_another_user(make_lease(connects=False))


HELLO_AS_STRANGER = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.settimeout(20)
sock.connect(sys.argv[1])
try:
    sock.send(bytes.fromhex(sys.argv[2]))
except BrokenPipeError:
    pass
try:
    answer = sock.recv(64)
except ConnectionResetError:
    answer = sock.recv(64)
print(answer[3:5].hex())
"""


def _hello_as_stranger(directory: Path, *, gid: int = STRANGER) -> str:
    """Kind and value of the answer, or the exception."""
    hello = Hello("job", "cpu:0", Role.PEER, 1.0).encode().hex()
    # Not our own interpreter, which may be where only this user can read.
    program = ["/usr/bin/env", "python3", "-I", "-c", HELLO_AS_STRANGER, str(directory / "broker.sock"), hello]
    ids = [f"--reuid={STRANGER}", f"--regid={gid}", "--clear-groups"]
    done = subprocess.run(["setpriv", *ids, *program], capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@needs_root
def test_another_user_cannot_reach_the_socket(processes: LeaseProcesses, lease_directory: Path) -> None:
    processes.broker()
    assert "PermissionError" in _hello_as_stranger(lease_directory)


@needs_root
def test_another_user_who_reaches_the_socket_is_refused(processes: LeaseProcesses, lease_directory: Path) -> None:
    processes.broker()
    lease_directory.chmod(0o755)
    (lease_directory / "broker.sock").chmod(0o666)
    assert _hello_as_stranger(lease_directory) == "0303"  # REFUSED, NOT_ALLOWED


@needs_root
def test_an_allowed_user_of_the_group_is_welcome_and_others_are_not(
    processes: LeaseProcesses, lease_directory: Path
) -> None:
    group = grp.getgrall()[-1]
    processes.broker(group=group.gr_name, allowed_uids=[STRANGER])
    assert "PermissionError" in _hello_as_stranger(lease_directory)
    assert _hello_as_stranger(lease_directory, gid=group.gr_gid) == "0200"  # WELCOME
    # Members of the group may connect; only the owner may put another socket there.
    assert lease_directory.stat().st_mode & 0o777 == 0o710


def test_clients_cannot_change_the_state_page(processes: LeaseProcesses) -> None:
    processes.broker()
    client = processes.raw()
    client.sock.send(Hello("job", "cpu:0", Role.PEER, 1.0).encode())
    _, [fd], _, _ = socket.recv_fds(client.sock, HELLO_BYTES, 1)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(fd)


def test_a_page_that_is_too_short_is_not_mapped(lease_directory: Path) -> None:
    with (lease_directory / "short").open("wb+") as file, pytest.raises(ValueError, match="too short"):
        PageReader(file.fileno(), slot=0)


FULL_SHM = 'mount -t tmpfs -o size=4k none /dev/shm && (cat /dev/zero > /dev/shm/full; exec "$@")'


@needs_root
def test_a_full_dev_shm_changes_nothing(processes: LeaseProcesses) -> None:
    wrapper = ("unshare", "--mount", "--propagation=private", "sh", "-c", FULL_SHM, "sh")
    # Client and, as it is the one to start it, broker.
    actor = processes.actor("a", wrapper=wrapper, spawn_broker=True)
    other = processes.actor("b")
    assert actor.call("acquire")
    other.start("acquire")
    eventually(lambda: actor.call("get", "contended"))
    with open(f"/proc/{processes.status()['pid']}/root/dev/shm/full", "rb") as file:
        assert os.fstatvfs(file.fileno()).f_bavail == 0
    actor.call("release")
    assert other.result()


def test_the_broker_loads_only_the_standard_library() -> None:
    """With torch it would be a process of hundreds of megabytes, seconds after it is needed; rich may be missing."""
    program = f"import sys; sys.path.append({PACKAGE!r}); import lease.broker.server, lease.client, lease.command; "
    program += "print([name for name in ('torch', 'numpy', 'rich', 'ddp_crossover') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, cwd=HERE)
    assert done.stdout == "[]\n", done.stderr
