"""The files of a cache under everything that happens to files: whatever it is, a sample is right or it is not there."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_crossover.addons.data import sample_store
from ddp_crossover.addons.data.sample_store import (
    HEADER_BYTES,
    INDEX,
    RECORD_BYTES,
    SAMPLES,
    SampleStore,
    StoredSamples,
    StoreRefused,
)

ROOT = Path(__file__).parents[3]
COUNT = 200
UNLIMITED = float("inf")


def sample(number: int) -> bytes:
    """Bytes of a sample, of any length between 1 and 5,000."""
    draw = random.Random(number)
    return draw.randbytes(draw.randrange(1, 5000))


def put(store: SampleStore, number: int) -> None:
    found = store.find(number)
    if found.data is None:
        store.add(number, sample(number), found)


def stored(directory: Path, count: int = COUNT) -> set[int]:
    """Numbers of the samples that are there; asserts that each is right."""
    store = SampleStore(directory, count, UNLIMITED)
    found = {number: store.find(number).data for number in range(count)}
    assert all(data == sample(number) for number, data in found.items() if data is not None)
    return {number for number, data in found.items() if data is not None}


# Stores all samples in an order of its own, and says when it has begun.
WRITER = """
import random, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_sample_store import COUNT, put
from ddp_crossover.addons.data.sample_store import SampleStore
store = SampleStore(Path(sys.argv[1]), COUNT, float("inf"))
order = list(range(COUNT))
random.Random(sys.argv[2]).shuffle(order)
print("begun", flush=True)
for number in order:
    put(store, number)
"""


def writer(directory: Path, seed: int = 0) -> subprocess.Popen[str]:
    code = WRITER.format(tests=str(Path(__file__).parent))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        [sys.executable, "-c", code, str(directory), str(seed)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None and job.stdout.readline() == "begun\n"
    return job


def test_what_is_stored_is_found_by_every_process(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "cache"
    store = SampleStore(directory, COUNT, UNLIMITED)
    assert store.find(3).data is None
    put(store, 3)
    assert store.find(3).data == sample(3)
    assert pickle.loads(pickle.dumps(store)).find(3).data == sample(3)
    assert stored(directory) == {3}
    assert StoredSamples(directory).numbers() == [3]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / SAMPLES).stat().st_mode & 0o777 == 0o600


def test_jobs_that_fill_it_at_once_store_each_sample_once(tmp_path: Path) -> None:
    jobs = [writer(tmp_path / "cache", seed) for seed in range(4)]
    assert [job.wait(timeout=60) for job in jobs] == [0] * 4
    there = stored(tmp_path / "cache")
    # Whoever cannot have the lock for a moment leaves a sample out, and all have tried all of them.
    assert len(there) >= 0.95 * COUNT
    assert (tmp_path / "cache" / SAMPLES).stat().st_size == sum(len(sample(number)) for number in there)


@pytest.mark.parametrize("moment", range(6))
def test_a_writer_killed_at_any_moment_leaves_no_wrong_sample(tmp_path: Path, moment: int) -> None:
    job = writer(tmp_path / "cache", seed=moment)
    time.sleep(random.Random(moment).uniform(0.0, 0.03))
    job.kill()
    job.communicate(timeout=60)
    before = stored(tmp_path / "cache")
    again = writer(tmp_path / "cache", seed=moment)
    assert again.wait(timeout=60) == 0
    assert stored(tmp_path / "cache") == set(range(COUNT)) >= before


class Died(BaseException):
    """The process has ended here."""


@pytest.mark.parametrize("write", range(3))
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_write_that_ends_in_the_middle_leaves_no_wrong_sample(tmp_path, monkeypatch, write, share) -> None:
    store = SampleStore(tmp_path / "cache", COUNT, UNLIMITED)
    put(store, 1)
    writes = 0
    real = os.pwrite

    def torn(fd: int, data: memoryview, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes == write + 1:
            real(fd, data[: int(share * len(data))], offset)
            raise Died
        return real(fd, data, offset)

    with monkeypatch.context() as patch, contextlib.suppress(Died):
        patch.setattr(os, "pwrite", torn)
        put(store, 2)
    assert {1} <= stored(tmp_path / "cache") <= {1, 2}
    put(SampleStore(tmp_path / "cache", COUNT, UNLIMITED), 2)
    assert stored(tmp_path / "cache") == {1, 2}


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Path]:
    store = SampleStore(tmp_path / "cache", 8, UNLIMITED)
    for number in range(8):
        put(store, number)
    yield tmp_path / "cache"


@pytest.mark.parametrize("name", [INDEX, SAMPLES])
def test_a_file_cut_anywhere_loses_samples_and_makes_none_wrong(filled: Path, name: str) -> None:
    whole = (filled / name).read_bytes()
    for length in sorted({*range(0, len(whole), max(1, len(whole) // 60)), len(whole) - 1}):
        (filled / name).write_bytes(whole[:length])
        lost = set(range(8)) - stored(filled, 8)
        assert lost
    store = SampleStore(filled, 8, UNLIMITED)
    for number in range(8):
        put(store, number)
    assert stored(filled, 8) == set(range(8))


@pytest.mark.parametrize("name", [INDEX, SAMPLES])
def test_a_flipped_bit_anywhere_loses_one_sample_at_most_and_makes_none_wrong(filled: Path, name: str) -> None:
    whole = (filled / name).read_bytes()
    draw = random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole)
        place = draw.randrange(len(whole))
        damaged[place] ^= 1 << draw.randrange(8)
        (filled / name).write_bytes(damaged)
        lost = set(range(8)) - stored(filled, 8)
        in_header = name == INDEX and place < HEADER_BYTES
        assert len(lost) == (0 if in_header else 1)


def test_records_in_each_others_places_are_no_records(filled: Path) -> None:
    packed = bytearray((filled / INDEX).read_bytes())
    first, second = (slice(HEADER_BYTES + at * RECORD_BYTES, HEADER_BYTES + (at + 1) * RECORD_BYTES) for at in (0, 1))
    packed[first], packed[second] = packed[second], packed[first]
    (filled / INDEX).write_bytes(packed)
    assert stored(filled, 8) == set(range(2, 8))


def test_damage_is_said_once_by_all_processes_and_repaired(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    (filled / SAMPLES).write_bytes(bytes((filled / SAMPLES).stat().st_size))
    for _ in range(2):
        store = SampleStore(filled, 8, UNLIMITED)
        for number in range(8):
            put(store, number)
    assert stored(filled, 8) == set(range(8))
    assert caplog.text.count("samples fail their checks, and are made again") == 1


@pytest.mark.parametrize("lost", [1, 5, 8])
def test_records_that_are_lost_do_not_count_twice(filled: Path, caplog: pytest.LogCaptureFixture, lost: int) -> None:
    caplog.set_level(logging.INFO, "ddp_crossover")
    os.truncate(filled / INDEX, HEADER_BYTES + (8 - lost) * RECORD_BYTES)
    store = SampleStore(filled, 8, UNLIMITED)
    for number in range(8):
        put(store, number)
    assert stored(filled, 8) == set(range(8))
    assert [line for line in caplog.messages if "all 8 of 8 samples stored" in line] == caplog.messages[-1:]
    assert len(caplog.messages) == 1


def test_a_clock_that_was_set_back_leaves_no_time_to_go() -> None:
    assert sample_store._to_go(sample_store.Header(3, 10, time.time() + 100, (0.0,)), 9) == ", about 0 s to go"


def test_a_file_that_shrinks_under_a_reader_ends_no_process(filled: Path) -> None:
    store = SampleStore(filled, 8, UNLIMITED)
    assert store.find(7).data == sample(7)
    os.truncate(filled / SAMPLES, 10)
    assert store.find(7).data is None


def test_at_the_limit_no_more_is_stored_and_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit_bytes = len(sample(0)) + len(sample(1))
    for _ in range(2):
        store = SampleStore(tmp_path / "cache", COUNT, limit_bytes)
        for number in range(5):
            put(store, number)
    assert stored(tmp_path / "cache") == {0, 1}
    assert caplog.text.count("has reached max_gb with 2 of 200 samples stored") == 1


def test_a_writer_that_is_stopped_holds_nobody_up(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "cache", COUNT, UNLIMITED)
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.flock(f, 2); print('held', flush=True)"
    command = [sys.executable, "-c", f"{code}; time.sleep(1000)", tmp_path / "cache" / INDEX]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None and job.stdout.readline() == "held\n"
        job.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        put(store, 1)
        assert time.monotonic() - start < 5
        assert store.find(1).data is None
    finally:
        job.kill()
        job.communicate()
    put(store, 1)
    assert store.find(1).data == sample(1)


def test_a_forked_process_does_not_share_the_lock_of_its_parent(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "cache", COUNT, UNLIMITED)
    files = store._open()
    fcntl.flock(files.index, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:
        put(store, 1)
        os._exit(store.find(1).data is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    fcntl.flock(files.index, fcntl.LOCK_UN)
    put(store, 1)
    assert store.find(1).data == sample(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("name", [".", INDEX, SAMPLES])
def test_what_belongs_to_another_user_is_refused(filled: Path, name: str) -> None:
    os.chown(filled / name, 65534, -1)
    with pytest.raises(StoreRefused, match="belongs to another user: give another dir"):
        SampleStore(filled, 8, UNLIMITED)


@pytest.mark.parametrize("name", [".", INDEX, SAMPLES])
def test_what_others_may_write_to_is_refused(filled: Path, name: str) -> None:
    (filled / name).chmod(0o777)
    with pytest.raises(StoreRefused, match="may be written to by other users: run chmod"):
        SampleStore(filled, 8, UNLIMITED)


def test_a_link_to_elsewhere_is_refused(filled: Path, tmp_path: Path) -> None:
    (filled / SAMPLES).rename(tmp_path / "elsewhere")
    (filled / SAMPLES).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreRefused, match="cannot be used"):
        SampleStore(filled, 8, UNLIMITED)


def test_progress_is_said_now_and_then_and_at_the_end(tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, "ddp_crossover")
    monkeypatch.setitem(sample_store._SILENCE_S, sample_store.Notice.PROGRESS, 0.05)
    store = SampleStore(tmp_path / "cache", 30, UNLIMITED)
    for number in range(30):
        put(store, number)
        time.sleep(0.01)
    *some, last = caplog.messages
    assert 1 <= len(some) < 10
    assert all(" of 30 samples stored, " in line and line.endswith(" s to go") for line in some)
    assert "all 30 of 30 samples stored" in last


def test_files_are_closed_with_the_store(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = SampleStore(tmp_path / "cache", COUNT, UNLIMITED)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del store
    assert len(os.listdir("/proc/self/fd")) == before
