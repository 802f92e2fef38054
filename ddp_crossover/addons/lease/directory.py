"""The directory in which broker and clients meet, one per user, and the checks that make it safe to use."""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat
from pathlib import Path

DIRECTORY_VARIABLE = "DDP_CROSSOVER_LEASE_DIR"


class DirectoryError(Exception):
    """The directory cannot be used. The message gives the reason and a remedy."""


class BrokerDirectory:
    """The directory of one broker.

    Args:
        directory: None for ``$DDP_CROSSOVER_LEASE_DIR``, else ``$XDG_RUNTIME_DIR/ddp_crossover``, else
            ``/tmp/ddp_crossover-<uid>``. The last two must belong to this user and be closed to all others. A directory
            given by argument or variable may belong to another user, whose broker is then trusted.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        named = directory or os.environ.get(DIRECTORY_VARIABLE)
        self.is_named = bool(named)
        self.path = Path(named) if named else _default_directory()
        self.socket = self.path / "broker.sock"
        self.lock = self.path / "broker.lock"
        self.log = self.path / "broker.log"

    def make(self, group: str | None = None) -> None:
        """Create the directory if it is missing, and check it. Raises :class:`DirectoryError` and ``OSError``.

        Members of ``group`` may connect but not write, because a user who can write here could replace the broker.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.owner() != os.geteuid():
            raise DirectoryError(f"{self.path} belongs to another user: choose another directory")
        if group is not None:
            try:
                gid = grp.getgrnam(group).gr_gid
            except KeyError:
                raise DirectoryError(f"group {group!r} does not exist on this host: choose another group") from None
            os.chown(self.path, -1, gid)
            self.path.chmod(0o710)

    def owner(self) -> int:
        """Check that the directory is safe and return its owner's uid. Raises the errors of :meth:`make`."""
        status = self.path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise DirectoryError(f"{self.path} is not a directory: remove it, or choose another directory")
        if not self.is_named and status.st_uid != os.geteuid():
            raise DirectoryError(
                f"{self.path} belongs to another user: set {DIRECTORY_VARIABLE} to a directory of your own"
            )
        closed_to = 0o027 if self.is_named else 0o077
        if status.st_mode & closed_to:
            raise DirectoryError(f"{self.path} is open to other users: run chmod 700 {self.path}")
        return status.st_uid

    def listen(self, group: str | None = None) -> tuple[socket.socket, int]:
        """Return a non-blocking listening socket and its inode. Replaces a dead broker's socket: needs the lock."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Bind under another name and rename at the end, so that clients only ever find a listening socket.
        path = self.path / f"broker.{os.getpid()}.sock"
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)
        if group is not None:
            os.chown(path, -1, self.path.stat().st_gid)
            path.chmod(0o660)
        listener.listen(128)
        listener.setblocking(False)
        path.rename(self.socket)
        return listener, self.socket.stat().st_ino

    def try_lock(self) -> int | None:
        """Take the lock that admits one broker per directory; return its descriptor, or None if it is taken.

        The lock file is never removed: another broker would create and lock a new file, and both would run.
        """
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        return fd


def _default_directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # After `su` the variable still names the other user's directory.
    if runtime and os.access(runtime, os.W_OK | os.X_OK) and os.stat(runtime).st_uid == os.geteuid():
        return Path(runtime) / "ddp_crossover"
    return Path(f"/tmp/ddp_crossover-{os.geteuid()}")
