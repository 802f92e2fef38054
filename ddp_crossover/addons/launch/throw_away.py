"""A throw-away copy of all files, for a script that is only tried: what it writes is dropped, on any path.

On Linux a process can have mounts of its own, without root in a user namespace of its own. There each folder that can
be written to gets an overlay (the kernel's overlayfs), whose upper layer is dropped at the end, and everything else is
read-only. Sockets, ``/dev``, ``/proc``, ``/run`` and the network are the real ones.

The ranks of one machine must see each other's files, so one process makes the copy and keeps it, and the scripts of all
ranks enter it. Both are this file, run by an interpreter that has loaded nothing: a process with threads may not enter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Real in the copy as well. What is shared there are devices, sockets and memory, not a script's results.
_REAL = (Path("/dev"), Path("/proc"), Path("/run"), Path("/sys"))
# File systems of the kernel, real wherever they are (a chroot has its own): no overlay goes over them.
_OF_KERNEL = ("proc", "sysfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2")
_DEPTH = 3  # of the folders that are looked through for those that can be written to, from each mount on
# From the kernel's sched.h and mount.h; Python 3.12's os has the first two.
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
# Options of a mount that an unprivileged process must repeat when it changes another one.
_LOCKED = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1 << 10, "nodiratime": 1 << 11, "relatime": 1 << 21}

# Trackers that would show the trial among the user's runs.
OFFLINE = {
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_START_ONLINE": "0",
    "MLFLOW_TRACKING_URI": "mlruns",
    "NEPTUNE_MODE": "offline",
    "SWANLAB_MODE": "disabled",
    "WANDB_MODE": "offline",
}


@contextlib.contextmanager
def throw_away_copy(folder: Path) -> Iterator[int]:
    """Keep a copy of all files in the context; yields the id of a process that is in it, see ``inside``.

    Args:
        folder: the only one that is not a copy.

    Raises:
        OSError: if the system lets nobody have that, with the reason.
    """
    if sys.platform != "linux":
        raise OSError("only Linux can overlay files")
    # A session of its own: who ends the ranks may not end it before it has cleaned up.
    with subprocess.Popen(
        [*_python(), "keep", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as keeper:  # fmt: skip
        assert keeper.stdin is not None and keeper.stdout is not None
        if answer := keeper.stdout.readline().strip():
            raise OSError(answer)
        yield keeper.pid


def inside(pid: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one in the copy that process ``pid`` keeps."""
    return [*_python(), "enter", str(pid), *command]


def _python() -> list[str]:
    return [sys.executable, "-IS", __file__]


def _keep(folder: Path) -> None:
    """Make a copy, print an empty line or why there is none, and drop the copy when stdin ends."""
    upper = Path(tempfile.mkdtemp(prefix="ddp_crossover-copy-"))
    outside = os.open(upper.parent, os.O_PATH)  # an overlay will hide the path
    try:
        _copy(upper, folder)
        print(flush=True)
        sys.stdin.read()
    except OSError as error:
        print(error.strerror or error, error.filename or "", flush=True)
    finally:
        shutil.rmtree(upper.name, dir_fd=outside, ignore_errors=True)


def _enter(pid: str, command: list[str]) -> None:
    """Become ``command`` in the copy of process ``pid``."""
    namespaces = [
        os.open(path, os.O_RDONLY) for path in (f"/proc/{pid}/ns/user", f"/proc/{pid}/ns/mnt") if not _is_mine(path)
    ]
    here = os.getcwd()
    for namespace in namespaces:
        _call("setns", namespace, 0)
        os.close(namespace)
    os.chdir(here)
    os.execv(shutil.which(command[0]) or command[0], command)


def _is_mine(namespace: str) -> bool:
    return os.readlink(namespace) == os.readlink(f"/proc/self/ns/{Path(namespace).name}")


def _copy(upper: Path, folder: Path) -> None:
    """Let this process see copies; ``upper`` takes what is written, and ``folder`` stays real."""
    here = Path.cwd()
    mounts, of_kernel = _mounts()
    is_privileged = _has_own_mounts(here)
    starts = dict.fromkeys([Path("/"), *mounts, *reversed(here.parents), here, Path.home()])
    trees: list[Path] = []
    for tree in _trees(starts, [*mounts, *of_kernel], is_privileged):
        if tree in mounts or not any(above in trees for above in (tree, *tree.parents)):
            trees.append(tree)
    hidden = _hidden([*mounts, *of_kernel], trees)
    # Descriptors lead to what overlays will hide.
    beneath = {path: os.open(path, os.O_PATH) for path in sorted({*trees, *hidden, folder})}
    layers = Path(f"/proc/self/fd/{os.open(upper, os.O_PATH)}")
    for number, (path, descriptor) in enumerate(beneath.items()):
        if path in trees:
            _overlay(path, descriptor, layers, number, by_user=not is_privileged)
        else:
            _mount(f"/proc/self/fd/{descriptor}", path, flags=_BIND | _REC)
    for path in mounts.keys() - set(trees):
        _mount(None, path, flags=_REMOUNT | _BIND | _RDONLY | mounts[path])
    os.chdir(here)  # through the overlays


def _has_own_mounts(here: Path) -> bool:
    """Give this process mounts of its own; returns whether it needed no user namespace for that."""
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _NEWNS)
        is_privileged = True
    except PermissionError:
        at = here.stat()
        if (at.st_uid, at.st_gid) != (user, group):  # only what is ours exists in our user namespace
            raise OSError("the working folder belongs to another user or group") from None
        _call("unshare", _NEWNS | _NEWUSER)
        is_privileged = False
        for what, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{what}").write_text(text)
    _mount(None, Path("/"), flags=_REC | _PRIVATE)
    return is_privileged


def _mounts() -> tuple[dict[Path, int], list[Path]]:
    """The mounts that are to be copied, with the options that they must keep, and those of the kernel."""
    found: dict[Path, int] = {}
    of_kernel = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        _, _, _, _, point, options, *_ = line.split()
        path = Path(point.encode().decode("unicode_escape"))
        if any(path.is_relative_to(real) for real in _REAL) or not path.exists():
            continue
        if line.partition(" - ")[2].split()[0] in _OF_KERNEL:
            of_kernel.append(path)
        else:
            found[path] = sum(_LOCKED.get(option, 0) for option in options.split(","))
    return found, of_kernel


def _trees(starts: Iterable[Path], mounts: Sequence[Path], is_privileged: bool) -> Iterator[Path]:
    """Folders that one overlay each can cover, the largest ones that can be written to."""

    def can_cover(folder: Path) -> bool:
        # A user may not look at what is beneath a mount that was made by others.
        return folder != Path("/") and (is_privileged or not any(folder in mount.parents for mount in mounts))

    def look(folder: Path, depth: int) -> Iterator[Path]:
        if folder in _REAL:
            return
        if os.access(folder, os.W_OK | os.X_OK) and can_cover(folder):
            yield folder
        elif depth:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False) and Path(entry.path) not in mounts:
                        yield from look(Path(entry.path), depth - 1)

    for start in starts:
        if start.is_dir():
            yield from look(start, _DEPTH)


def _hidden(mounts: Iterable[Path], trees: Sequence[Path]) -> list[Path]:
    """Mounts that no overlay covers, and sockets, which an overlay does not connect to those who listen."""
    fields = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()]
    sockets = [Path(path) for *_, path in fields if path.startswith("/") and os.path.exists(path)]
    return [path for path in [*mounts, *sockets] if path not in trees and any(tree in path.parents for tree in trees)]


def _overlay(path: Path, lower: int, upper: Path, number: int, *, by_user: bool) -> None:
    changes, work = upper / f"{number}", upper / f"{number}.work"
    changes.mkdir()
    work.mkdir()
    like = os.stat(lower)
    with contextlib.suppress(OSError):  # in a user namespace
        os.chown(changes, like.st_uid, like.st_gid)
    changes.chmod(like.st_mode & 0o7777)
    options = f"lowerdir=/proc/self/fd/{lower},upperdir={changes},workdir={work}{',userxattr' * by_user}"
    _mount("overlay", path, "overlay", options=options)


def _mount(
    source: str | None, target: Path, kind: str | None = None, flags: int = 0, options: str | None = None
) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, str(target), kind, options)]
    try:
        _call("mount", *texts[:3], flags, texts[3])
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None


def _call(name: str, *arguments: bytes | int | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        _keep(Path(sys.argv[2]))
    else:
        _enter(sys.argv[2], sys.argv[3:])
