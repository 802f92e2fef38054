"""Samples on local disk, as bytes: two files that any number of processes of this host read and append to.

`samples` holds the bytes, one sample after the other. `index` holds a header, and a record for each sample of the data
set: where its bytes are, how many, and their checksum. A record is written after the bytes, under a lock that the
kernel gives up for a killed process, so a sample is there or it is not. What a crash of the machine or a bad disk
leaves behind, checksums find. Nobody waits for long: what cannot be stored now is made again next time.

The files are read, not mapped: the page cache holds one copy for all processes either way, and a mapped file that
somebody truncates ends its readers with SIGBUS. No library does this: lmdb hangs after forks, diskcache is unmaintained
and pickles, and streaming formats (litdata, MDS) want the data set converted first and loaders of their own.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import logging
import math
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddp_crossover.log import say, short

INDEX, SAMPLES = "index", "samples"
_LOCK_ATTEMPTS, _LOCK_PAUSE_S = 20, 0.001


class StoreRefused(Exception):
    """The directory cannot be used; the message gives the reason and a remedy."""


class Notice(enum.IntEnum):
    """Kinds of lines that are said once for all processes."""

    PROGRESS = 0
    FULL = 1
    DAMAGED = 2
    NOT_STORABLE = 3


# For so long after a line no process says another of its kind.
_SILENCE_S = {Notice.PROGRESS: 15.0, Notice.FULL: 3600.0, Notice.DAMAGED: 3600.0, Notice.NOT_STORABLE: 3600.0}
_RECORD = struct.Struct("<QQI")
_CHECKSUM = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECKSUM.size


class Record(NamedTuple):
    """Where the bytes of a sample are, and their checksum, which covers the sample's number as well."""

    offset: int
    length: int
    checksum: int

    def pack(self, number: int) -> bytes:
        """The record as it stands in the index, with a checksum of its own."""
        fields = _RECORD.pack(*self)
        return fields + _CHECKSUM.pack(zlib.crc32(fields, number))

    @classmethod
    def unpack(cls, packed: bytes, number: int) -> Record | None:
        """None if there is no record, or a damaged one."""
        if len(packed) < RECORD_BYTES:
            return None
        record = cls(*_RECORD.unpack_from(packed))
        return record if record.length and record.pack(number) == packed else None


_HEADER = struct.Struct(f"<QQd{len(Notice)}d")
HEADER_BYTES = 64
_MOST = 2**60


class Header(NamedTuple):
    """What all processes know together: for people only, so it may be a sample behind after a crash.

    Attributes:
        stored: number of samples.
        stored_bytes: their bytes.
        first_s: when the first one was stored, as of `time.time()`.
        said_s: when a line of each kind was last said.
    """

    stored: int
    stored_bytes: int
    first_s: float
    said_s: tuple[float, ...]

    def pack(self) -> bytes:
        return _HEADER.pack(*self[:3], *self.said_s)

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        if len(packed) < _HEADER.size:
            return cls(0, 0, 0.0, (0.0,) * len(Notice))
        stored, stored_bytes, first_s, *said_s = _HEADER.unpack_from(packed)
        if max(stored, stored_bytes) > _MOST or not all(map(math.isfinite, (first_s, *said_s))):
            return cls(0, 0, 0.0, (0.0,) * len(Notice))  # damaged
        return cls(stored, stored_bytes, first_s, tuple(said_s))


class Files:
    """The open files of one process: a lock on them excludes other processes, those forked from it included."""

    def __init__(self, directory: Path) -> None:
        self.pid = os.getpid()
        self.threads = threading.Lock()
        self.index = self.samples = -1
        self.index = _open_own(directory / INDEX)
        self.samples = _open_own(directory / SAMPLES)

    def __del__(self) -> None:
        for fd in (self.index, self.samples):
            if fd >= 0 and os is not None:  # at the end of the program modules may be gone
                os.close(fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether the lock could be had: not for long, as its holder may have been stopped."""
        if not self.threads.acquire(timeout=_LOCK_ATTEMPTS * _LOCK_PAUSE_S):
            yield False
            return
        try:
            is_held = self._try_lock()
            try:
                yield is_held
            finally:
                if is_held:
                    fcntl.flock(self.index, fcntl.LOCK_UN)
        finally:
            self.threads.release()

    def _try_lock(self) -> bool:
        for _ in range(_LOCK_ATTEMPTS):
            try:
                fcntl.flock(self.index, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                pass
            except OSError as error:  # some network file systems have no locks
                raise StoreRefused(f"files cannot be locked there: {error}") from error
            time.sleep(_LOCK_PAUSE_S)
        return False


class _Line(NamedTuple):
    """What is to be said."""

    level: int
    text: str


class Found(NamedTuple):
    """What a look for a sample has found: its bytes, or None. `packed` is its record, there or not, damaged or not."""

    data: bytearray | None
    packed: bytes


class SampleStore:
    """The stored samples of one data set. May be pickled and forked; each process opens the files for itself.

    Args:
        directory: made for this user alone, if it is missing.
        count: number of samples of the data set.
        limit_bytes: samples that would take more than this together are not stored.

    Raises:
        StoreRefused: if others may write there, or the files cannot be opened; also from each method in a new process.
    """

    def __init__(self, directory: Path, count: int, limit_bytes: float) -> None:
        self.directory = directory
        self._count = count
        self._limit_bytes = limit_bytes
        self._files: Files | None = None
        self._takes_more = True
        self._open()

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_files": None}

    def find(self, number: int) -> Found:
        """Read a sample. Damaged bytes, and those that the disk does not give, are the same as none."""
        files = self._open()
        return _find(files.index, files.samples, number)

    def add(self, number: int, data: bytes, found: Found) -> None:
        """Store a sample that `find` has not found, unless another process has, or there is no room."""
        if not self._takes_more:
            return
        files = self._open()
        with files.locked() as is_held:
            due = self._append(files, number, data, found) if is_held else None
        self._say(due)

    def say_once(self, notice: Notice, text: str) -> None:
        """Say this, if no process has said a line of its kind for a while."""
        files = self._open()
        with files.locked() as is_held:
            due = self._if_due(files, _read_header(files), notice, text) if is_held else None
        self._say(due)

    # With the lock held. Each returns what to say when it is given back.

    def _append(self, files: Files, number: int, data: bytes, found: Found) -> _Line | None:
        header, end = _read_header(files), os.fstat(files.samples).st_size
        if end + len(data) > self._limit_bytes:
            self._takes_more = False
            return self._if_due(files, header, Notice.FULL, f"has reached max_gb with {self._part(header)}")
        is_new = not any(found.packed)
        try:
            if os.pread(files.index, RECORD_BYTES, _place(number)) != found.packed:
                return None  # another process has stored it meanwhile
            _write(files.samples, data, end)
            _write(files.index, Record(end, len(data), zlib.crc32(data, number)).pack(number), _place(number))
            stored = header.stored + is_new
            if is_new and stored >= self._count:  # what a damaged index has lost does not count twice
                stored = sum(any(packed) for packed in _records(files.index, self._count))
            header = header._replace(
                stored=stored,
                stored_bytes=header.stored_bytes + len(data),
                first_s=header.first_s or time.time(),
            )
            _write(files.index, header.pack(), 0)
        except OSError as error:
            self._takes_more = False
            with contextlib.suppress(OSError):
                os.ftruncate(files.samples, end)
            text = f"can store no more ({error.strerror}) than {self._part(header)}"
            return self._if_due(files, header, Notice.FULL, text)
        if not is_new:
            return self._if_due(files, header, Notice.DAMAGED, "samples fail their checks, and are made again")
        if header.stored == self._count:
            return _Line(logging.INFO, f"all {self._part(header)}")
        return self._if_due(files, header, Notice.PROGRESS, f"{self._part(header)}{_to_go(header, self._count)}")

    def _if_due(self, files: Files, header: Header, notice: Notice, text: str) -> _Line | None:
        now_s = time.time()
        first_s = header.first_s if notice is Notice.PROGRESS else 0.0
        if now_s - max(first_s, header.said_s[notice]) < _SILENCE_S[notice]:
            return None
        said_s = tuple(now_s if kind == notice else at_s for kind, at_s in enumerate(header.said_s))
        with contextlib.suppress(OSError):
            _write(files.index, header._replace(said_s=said_s).pack(), 0)
        return _Line(logging.INFO if notice is Notice.PROGRESS else logging.WARNING, text)

    def _part(self, header: Header) -> str:
        return f"{header.stored:,} of {self._count:,} samples stored, {short(header.stored_bytes / 1e9)} GB"

    def _say(self, line: _Line | None) -> None:
        if line is not None:
            say(f"data cache {self.directory.parent}, {self.directory.name[:12]}: {line.text}", line.level)

    def _open(self) -> Files:
        if self._files is None or self._files.pid != os.getpid():
            self._files = _open_files(self.directory)
        return self._files


class StoredSamples:
    """The stored samples of a cache, to look at. Needs no data set, and changes nothing."""

    def __init__(self, directory: Path) -> None:
        self._index = (directory / INDEX).open("rb", buffering=0)
        self._samples = (directory / SAMPLES).open("rb", buffering=0)

    def numbers(self) -> list[int]:
        count = max(0, os.fstat(self._index.fileno()).st_size - HEADER_BYTES) // RECORD_BYTES
        records = enumerate(_records(self._index.fileno(), count))
        return [number for number, packed in records if Record.unpack(packed, number)]

    def is_whole(self, number: int) -> bool:
        """Whether a sample's bytes have their checksum."""
        return _find(self._index.fileno(), self._samples.fileno(), number).data is not None


def _find(index: int, samples: int, number: int) -> Found:
    try:
        packed = os.pread(index, RECORD_BYTES, _place(number))
        record = Record.unpack(packed, number)
        if record is None or record.offset + record.length > os.fstat(samples).st_size:
            return Found(None, packed)
        data = bytearray(record.length)
        read_bytes = os.preadv(samples, [data], record.offset)
    except OSError:
        return Found(None, b"")
    is_whole = read_bytes == record.length and zlib.crc32(data, number) == record.checksum
    return Found(data if is_whole else None, packed)


def _open_files(directory: Path) -> Files:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(directory, directory.lstat())
        return Files(directory)
    except OSError as error:
        raise StoreRefused(f"{directory} cannot be used: {error.strerror}") from error


def _open_own(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _check_own(path, os.fstat(fd))
    except StoreRefused:
        os.close(fd)
        raise
    return fd


def _check_own(path: Path, status: os.stat_result) -> None:
    """Others could put samples of theirs into what they may write to."""
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
        raise StoreRefused(f"{path} belongs to another user: give another dir")
    if status.st_mode & 0o022:
        raise StoreRefused(f"{path} may be written to by other users: run chmod -R go-w {path}, or give another dir")


def _place(number: int) -> int:
    return HEADER_BYTES + number * RECORD_BYTES


def _records(index: int, count: int) -> Iterator[bytes]:
    packed = os.pread(index, count * RECORD_BYTES, HEADER_BYTES)
    return (packed[at : at + RECORD_BYTES] for at in range(0, len(packed), RECORD_BYTES))


def _read_header(files: Files) -> Header:
    return Header.unpack(os.pread(files.index, HEADER_BYTES, 0))


def _write(fd: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _to_go(header: Header, count: int) -> str:
    seconds = max(0.0, time.time() - header.first_s) * max(0.0, count / header.stored - 1)  # clocks may be set back
    return f", about {seconds / 60:.0f} min to go" if seconds > 90 else f", about {seconds:.0f} s to go"
