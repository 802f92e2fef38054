"""``tuned.json``: what the tuner found, kept for the next run of the same model on the same world.

One readable file for many models and jobs, an entry per key of :func:`describe_model`. A save reads the file, replaces
its own entry and puts the new file in the old one's place in one step, under a lock, so jobs that save at once keep
each other's entries and a crash leaves the old file. A file that cannot be understood is never ignored and never
overwritten.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from ddp_crossover.fusion import MB
from ddp_crossover.planning.trials import Candidate
from ddp_crossover.planning.tuner import TuningResult

FORMAT = "ddp_crossover tuned"
VERSION = 1
# A save takes milliseconds. Whoever holds the lock for longer is stopped or hangs on its file system.
LOCK_TIMEOUT_S = 10.0


class TunedFileError(ValueError):
    """The file is broken or not ours: names it and the way out."""


def describe_model(
    named: Iterable[tuple[str, Tensor]], *, world_size: int, backend: str, device_type: str, wire_dtype: str | None
) -> tuple[str, dict[str, Any]]:
    """The key of a model on a world, and what to show of it to people.

    Args:
        named: full parameter names and parameters, in DDP's order. Values are not looked at.
        world_size: number of ranks.
        backend: of the process group, such as ``"gloo"``.
        device_type: such as ``"cuda"``.
        wire_dtype: such as ``"torch.bfloat16"``, or None for the parameters' own.

    Returns:
        a SHA-256 in hex over all of it, equal on all ranks and in every run, and the part that people can read.
    """
    parameters = list(named)
    world = {"world_size": world_size, "backend": backend, "device_type": device_type, "wire_dtype": wire_dtype}
    identity = {**world, "parameters": [[name, list(p.shape), str(p.dtype)] for name, p in parameters]}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    numel = sum(p.numel() for _, p in parameters)
    mib = sum(p.nbytes for _, p in parameters) / MB
    return key, {"parameters": numel, "mib": round(mib, 3), **world}


def load_tuned(path: str | os.PathLike[str], key: str) -> Candidate | None:
    """What was best for ``key``, or None where it has no entry, or there is no file yet.

    Raises:
        TunedFileError: if there is a file and it cannot be understood.
        OSError: if it cannot be read.
    """
    path = Path(path).resolve()
    entries = _read_entries(path)
    if key not in entries:
        return None
    try:
        return Candidate(**entries[key]["result"]["best"])
    except (KeyError, TypeError, ValueError) as error:
        _refuse(path, f"its entry {key} does not hold a tuning result ({error!r})")


def save_tuned(path: str | os.PathLike[str], key: str, model: Mapping[str, Any], result: TuningResult) -> None:
    """Put ``result`` into the file under ``key``; all other entries stay. Makes the file (mode 0600) if there is none.

    The lock is ``<path>.lock``, which stays: removing it would let two jobs hold two different locks.

    Raises:
        TunedFileError: if there is a file and it cannot be understood; it is left as it is.
        TimeoutError: if another job holds the lock for longer than any save takes.
        OSError: if it cannot be written; the old file stays.
    """
    path = Path(path).resolve()  # a link stays a link
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    entry = {"summary": result.describe(), "model": model, "result": asdict(result), "date": date}
    with _locked(path.with_name(path.name + ".lock")):
        content = {"format": FORMAT, "version": VERSION, "entries": {**_read_entries(path), key: entry}}
        _replace(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def _read_entries(path: Path) -> dict[str, Any]:
    """Entries as they stand in the file; none if there is no file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:  # neither JSON nor UTF-8
        _refuse(path, f"it is not JSON ({error})")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        _refuse(path, "it was not written by ddp_crossover")
    if content.get("version") != VERSION:
        _refuse(path, f"it has version {content.get('version')!r}, and this ddp_crossover reads version {VERSION}")
    entries = content.get("entries")
    if not isinstance(entries, dict):
        _refuse(path, "it has no entries")
    return entries


def _refuse(path: Path, why: str) -> NoReturn:
    raise TunedFileError(f"{path} cannot be used: {why}. Move it away to tune anew, or give another path")


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{lock} has been held by another process for {LOCK_TIMEOUT_S:g} s: "
                        "end that process and save again"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)  # and with it the lock


def _replace(path: Path, text: str) -> None:
    """Either the old content or the new is in the file, whatever happens. Only under the lock."""
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)  # of a job that was killed while it held the lock
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Before the rename: else a power cut may leave the new name on an empty file.
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
