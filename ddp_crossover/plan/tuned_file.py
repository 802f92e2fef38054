"""``tuned.json``: keeps the tuner's results for the next run of the same model on the same world.

One human-readable file serves many models and jobs, with an entry per key of :func:`describe_model`. A save reads the
file, replaces its own entry and replaces the file atomically, all under a lock. So jobs that save at the same time keep
each other's entries, and a crash leaves the old file. A file that cannot be understood is an error; it is never
overwritten.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Parameter

from ddp_crossover.comm.agreement import all_gather_json
from ddp_crossover.comm.link import Link
from ddp_crossover.fusion import MB
from ddp_crossover.log import say
from ddp_crossover.options import Options
from ddp_crossover.plan.trials import Candidate
from ddp_crossover.plan.tuner import TuningResult

FORMAT = "ddp_crossover tuned"
VERSION = 1
# A save takes milliseconds. A process that holds the lock for longer is stopped or hangs on its file system.
LOCK_TIMEOUT_S = 10.0


class TunedFileError(ValueError):
    """The file is broken or not ours. The message names the file and a remedy."""


class TunedMemory:
    """The entry of one model in the user's ``tuned_file``, if there is one; rank 0 reads and writes it for all ranks.

    Args:
        named: names and parameters that DDP manages.
        options: the user's options.
        link: link between the ranks.
        backend: backend of the process group, such as ``"gloo"``.

    Attributes:
        known: the best candidate of an earlier run; None before :meth:`load`, or if there is none.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], options: Options, link: Link, backend: str) -> None:
        self.known: Candidate | None = None
        self._path = options.tuned_file
        self._link = link
        self._device = named[0][1].device
        self._key, self._model = describe_model(
            named,
            world_size=link.world_size,
            backend=backend,
            device_type=self._device.type,
            options=options.of_the_plan(),
        )

    def load(self) -> None:
        """Read the file on rank 0, for all ranks. A collective if there is a file.

        Raises:
            TunedFileError: on every rank, if rank 0 cannot use the file.
        """
        if self._path is None:
            return
        mine: dict[str, Any] = {}
        if self._link.rank == 0:
            try:
                if (best := load_tuned(self._path, self._key)) is not None:
                    mine["found"] = asdict(best)
            except (TunedFileError, OSError) as error:
                mine["error"] = str(error)
        of_rank_0 = all_gather_json(mine, self._link.process_group, self._device)[0]
        if "error" in of_rank_0:
            raise TunedFileError(of_rank_0["error"])
        self.known = Candidate(**of_rank_0["found"]) if "found" in of_rank_0 else None

    def save(self, result: TuningResult) -> None:
        """Save a result on rank 0. Failures are only logged: they cost the next run its trials and this run nothing."""
        if self._path is None or self._link.rank != 0:
            return
        try:
            save_tuned(self._path, self._key, self._model, result)
        except (TunedFileError, OSError) as error:
            say(f"the result of tuning could not be saved to tuned_file: {error}", logging.WARNING)


def describe_model(
    named: Sequence[tuple[str, Tensor]],
    *,
    world_size: int,
    backend: str,
    device_type: str,
    options: Mapping[str, object] = MappingProxyType({}),
) -> tuple[str, dict[str, Any]]:
    """The key of a model on a world, and a human-readable description of both.

    Args:
        named: full parameter names and parameters, in DDP's order. Their values do not matter.
        world_size: number of ranks.
        backend: backend of the process group, such as ``"gloo"``.
        device_type: device type of the parameters, such as ``"cuda"``.
        options: what :meth:`~ddp_crossover.options.Options.of_the_plan` returns.

    Returns:
        The key, a SHA-256 in hex over the arguments (names, shapes and dtypes of parameters), which is equal on all
        ranks and in every run; and the description, ready for JSON.
    """
    world: dict[str, Any] = {
        "world_size": world_size,
        "backend": backend,
        "device_type": device_type,
        **options,
    }
    identity = {**world, "parameters": [[name, list(p.shape), str(p.dtype)] for name, p in named]}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    numel = sum(p.numel() for _, p in named)
    mib = sum(p.nbytes for _, p in named) / MB
    return key, {"parameters": numel, "mib": round(mib, 3), **world}


def load_tuned(path: str | os.PathLike[str], key: str) -> Candidate | None:
    """The best candidate saved under ``key``; None if the file or the entry does not exist.

    Raises:
        TunedFileError: if the file exists and cannot be understood.
        OSError: if the file cannot be read.
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
    """Save ``result`` under ``key``; all other entries stay. Creates the file (mode 0600) if it does not exist.

    The lock file ``<path>.lock`` is never removed: otherwise two jobs could hold two different locks.

    Raises:
        TunedFileError: if the file exists and cannot be understood; the file is not changed.
        TimeoutError: if another job holds the lock for more than ``LOCK_TIMEOUT_S`` (10 s).
        OSError: if the file cannot be written; the old file stays.
    """
    path = Path(path).resolve()  # so that replacing the file does not replace a symbolic link
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    entry = {"summary": result.describe(), "model": model, "result": asdict(result), "date": date}
    with _locked(path.with_name(path.name + ".lock")):
        content = {"format": FORMAT, "version": VERSION, "entries": {**_read_entries(path), key: entry}}
        _replace(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def _read_entries(path: Path) -> dict[str, Any]:
    """The entries of the file; empty if the file does not exist."""
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
    raise TunedFileError(f"tuned_file {path} cannot be used: {why}. Move it away to tune anew, or pass another path")


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
        os.close(fd)  # also releases the lock


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically: after a crash it holds the old or the new text. Call it under the lock."""
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)  # left by a job that was killed while it held the lock
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Sync before the rename: otherwise a power cut may leave an empty file under the final name.
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
