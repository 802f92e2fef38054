"""Tuning results on disk: what comes back, what survives other jobs and crashes, what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import stat
from pathlib import Path

import pytest
import torch

import ddp_crossover as dx
from ddp_crossover.fusion import Schedule
from ddp_crossover.options import Options
from ddp_crossover.plan import tuned_file
from ddp_crossover.plan.trials import Candidate, Trial
from ddp_crossover.plan.tuned_file import TunedFileError, describe_model, load_tuned, save_tuned
from ddp_crossover.plan.tuner import TuningResult
from harness import run_faulty_ranks

NAMED = [("a.weight", torch.zeros(3, 4)), ("a.bias", torch.zeros(3, dtype=torch.float64))]
WORLD = {"world_size": 2, "backend": "gloo", "device_type": "cpu"}
OTHER_OPTIONS = [
    Options(wire_dtype=torch.bfloat16),
    Options(wire_dtype=torch.int8),
    Options(compress=dx.TopK(0.01)),
    Options(compress=dx.TopK(0.02)),
    Options(groups="node"),
    Options(connections=2),
    Options(norms="sharded"),
    Options(shard_optimizer=True),
    Options(weighted=True),
]
PLAIN = Candidate(5.21, Schedule.ALLREDUCE, as_built=True)
KEY, MODEL = describe_model(NAMED, **WORLD)

pytestmark = pytest.mark.quick


def result(fusion_mb: float = 5.21) -> TuningResult:
    trials = (Trial(Candidate(fusion_mb), (0.1, 0.3, 0.2)), Trial(PLAIN, (0.4,)))
    best = Candidate(fusion_mb)
    return TuningResult(best, 0.2, best, 0.2, PLAIN, 0.4, trials, 12, "of a test")


def save(path: Path | str, key: str = KEY, fusion_mb: float = 5.21) -> None:
    save_tuned(path, key, MODEL, result(fusion_mb))


def test_what_was_saved_is_loaded_and_can_be_read_by_people(tmp_path) -> None:
    path = tmp_path / "tuned.json"
    assert load_tuned(path, KEY) is None
    save(path)
    assert load_tuned(path, KEY) == Candidate(5.21)
    assert load_tuned(path, "another model") is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    raw = json.loads(path.read_text())
    assert raw["version"] == 1
    shown = raw["entries"][KEY]
    assert shown["summary"] == result().describe()
    assert shown["model"] == {"parameters": 15, "mib": round(72 / 2**20, 3), **WORLD}
    assert shown["result"]["trials"][0]["steps_s"] == [0.1, 0.3, 0.2]


def test_entries_of_others_stay_and_ones_own_is_replaced(tmp_path) -> None:
    path = tmp_path / "tuned.json"
    save(path, "other", 1.0)
    save(path, KEY, 2.0)
    save(path, KEY, 4.0)
    assert load_tuned(path, "other") == Candidate(1.0)
    assert load_tuned(path, KEY) == Candidate(4.0)


def test_the_key_tells_models_and_worlds_apart_and_nothing_else() -> None:
    def key(named=NAMED, **changes) -> str:
        return describe_model(named, **{**WORLD, **changes})[0]

    assert key([(name, torch.ones_like(p)) for name, p in NAMED]) == KEY
    assert key(options=Options(tune=False, tuned_file="a", strict=True).of_the_plan()) == KEY
    others = [
        key(world_size=4),
        key(backend="nccl"),
        key(device_type="cuda"),
        *(key(options=options.of_the_plan()) for options in OTHER_OPTIONS),
        key(NAMED[:1]),
        key(NAMED[::-1]),
        key([("b.weight", NAMED[0][1]), NAMED[1]]),
        key([("a.weight", torch.zeros(4, 3)), NAMED[1]]),
        key([("a.weight", torch.zeros(3, 4, dtype=torch.float16)), NAMED[1]]),
    ]
    assert len({KEY, *others}) == 1 + len(others)


def _save_many(path: str) -> None:
    rank = torch.distributed.get_rank()
    torch.distributed.barrier()
    for number in range(25):
        save(path, f"{rank}-{number}")


def test_two_processes_that_save_at_once_lose_nothing(tmp_path, on_ranks) -> None:
    path = tmp_path / "tuned.json"
    on_ranks(_save_many, 2, str(path))
    assert len(json.loads(path.read_text())["entries"]) == 50


def _die_in_the_middle_of_saving(path: str) -> None:
    # The new content is written by then, and not yet in place.
    os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
    save(path, KEY, 9.0)


def test_a_crash_in_the_middle_leaves_the_old_file_and_no_lock(tmp_path) -> None:
    path = tmp_path / "tuned.json"
    save(path, KEY, 1.0)
    before = path.read_bytes()
    (outcome,) = run_faulty_ranks(_die_in_the_middle_of_saving, 1, str(path), group_timeout_s=20)
    assert outcome.exitcode == -signal.SIGKILL
    assert path.read_bytes() == before
    save(path, KEY, 2.0)
    assert load_tuned(path, KEY) == Candidate(2.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuned.json", "tuned.json.lock"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "tuned.json"
    save(path, KEY, 1.0)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))  # as good as a full disk
    try:
        with pytest.raises(OSError):
            save(path, KEY, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuned.json", "tuned.json.lock"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", "not written by ddp_crossover"),
        (b'{"name": "package"}', "not written by ddp_crossover"),
        (b'{"format": "ddp_crossover tuned", "version": 2, "entries": {}}', "version 2"),
        (b'{"format": "ddp_crossover tuned", "version": 1}', "no entries"),
    ],
)
def test_a_broken_or_foreign_file_is_neither_ignored_nor_overwritten(tmp_path, content, why) -> None:
    path = tmp_path / "tuned.json"
    path.write_bytes(content)
    for use in (lambda: load_tuned(path, KEY), lambda: save(path)):
        with pytest.raises(TunedFileError, match=why) as caught:
            use()
        assert str(path) in str(caught.value)
        assert "Move it away" in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw["result"].update(best={"fusion_mb": -1, "schedule": "auto"}),
        lambda raw: raw["result"].update(best={"size": 8}),
        lambda raw: raw["result"].pop("best"),
    ],
)
def test_a_damaged_entry_is_named_and_others_can_still_be_used(tmp_path, damage) -> None:
    path = tmp_path / "tuned.json"
    save(path, "good")
    save(path)
    content = json.loads(path.read_text())
    damage(content["entries"][KEY])
    path.write_text(json.dumps(content))
    with pytest.raises(TunedFileError, match=KEY):
        load_tuned(path, KEY)
    assert load_tuned(path, "good") == Candidate(5.21)


def test_a_lock_that_nobody_gives_back_is_an_error_not_a_hang(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tuned_file, "LOCK_TIMEOUT_S", 0.1)
    path = tmp_path / "tuned.json"
    with Path(f"{path}.lock").open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"tuned\.json\.lock"):
            save(path)
    assert not path.exists()


def test_a_link_stays_a_link(tmp_path) -> None:
    target, link = tmp_path / "shared.json", tmp_path / "tuned.json"
    link.symlink_to(target)
    save(link)
    assert link.is_symlink()
    assert load_tuned(target, KEY) == Candidate(5.21)
