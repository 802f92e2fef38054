"""`scripts/soak.py`: short soaks, one as it is and one with faults planted in it; what counts as growth."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import soak
from bench_kit.launch import ROOT
from soak_parts import conduct
from soak_parts.settings import SoakSettings
from soak_parts.verdict import ALLOWED, Course, courses, differences

STEPS = 240

pytestmark = pytest.mark.xdist_group("soak")


@pytest.mark.nightly
def test_a_short_soak(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    status = soak.main(["--steps", str(STEPS), "--json", str(file)])
    record = json.loads(file.read_text())
    # The bits are those of plain DDP.
    assert record["differences"] == []
    for ours, theirs in zip(record["runs"]["attached"], record["runs"]["plain"], strict=True):
        assert ours["digest"] == theirs["digest"] and len(ours["digest"]) > 100
        assert [sample["loss"] for sample in ours["samples"]] == [sample["loss"] for sample in theirs["samples"]]
    # What can be counted exactly does not grow. Memory and the time of a step do settle later than that.
    counted = ("threads", "descriptors", "tensors")
    assert [name for name in record["growing"] if name.startswith(counted)] == []
    assert status == (1 if record["growing"] else 0)
    # All parts took part.
    for rank in record["runs"]["attached"]:
        facts = rank["facts"]
        assert facts["attached"] == 8 and facts["steps"] >= STEPS - 1
        assert 0 < facts["pipelined_steps"] < facts["steps"] and facts["grants"] > 0
        assert len(rank["samples"]) == 40
    assert all(neighbour["turns"] > 0 for neighbour in record["runs"]["neighbours"])
    watched = record["runs"]["attached"][0]["samples"][0]["figures"]
    assert watched.keys() == {"rank 0", "broker", "neighbour 0", "neighbour 1"}


@pytest.mark.nightly
def test_planted_leaks_and_a_planted_difference_are_found(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(conduct, "RANK", ["-m", "leaking_soak_rank"])
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")))
    )
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "soak.json"
    assert soak.main(["--steps", str(STEPS), "--json", str(file)]) == 1
    record = json.loads(file.read_text())
    for rank in (0, 1):
        assert {f"tensors of rank {rank}", f"descriptors of rank {rank}"} <= set(record["growing"])
    assert [name for name in record["growing"] if "broker" in name or "neighbour" in name] == []
    # The sample after step 90, where the weight changed, is the first that can show it.
    assert all("first unequal loss after step 90" in line for line in record["differences"])
    assert len(record["differences"]) == 2
    printed = capsys.readouterr().out
    assert "GROWING: " in printed and "UNEQUAL" in printed and "values differ (model.0." in printed


def test_nobody_else_may_enter_the_directory_and_nothing_stays() -> None:
    seen: list[tuple[Path, int]] = []

    def run_ranks(arguments: list[str], environment: dict[str, str], on_line: object) -> None:
        directory = Path(environment["TMPDIR"])
        seen.append((directory, stat.S_IMODE(directory.stat().st_mode)))
        watched = SoakSettings.read(Path(arguments[-2])).watched.values()
        assert all(Path("/proc", str(pid)).exists() for pid in watched)
        pids.extend(watched)
        raise InterruptedError("as Ctrl-C would")

    pids: list[int] = []
    with pytest.raises(InterruptedError):
        conduct.conduct(STEPS, run_ranks, lambda arm: None, lambda doing, behind: None)
    ((directory, mode),) = seen
    assert mode == 0o700 and not directory.exists()
    deadline_s = time.monotonic() + 30  # the broker is nobody's child, and its end is not waited for
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert len(pids) == 3 and not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    """Whether it runs. One that has ended, and whose parent has not asked for that, does not."""
    status = Path("/proc", str(pid), "stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def course_of(values: list[float], figure: str) -> Course:
    samples = [{"figures": {"rank 0": {figure: value}}} for value in values]
    (course,) = courses([{"samples": samples}])
    return course


@given(st.integers(40, 200), st.floats(200, 1e6), st.tuples(*3 * [st.sampled_from([0, 40, 90])]))
def test_a_steady_leak_grows_and_the_options_in_force_do_not(count: int, leaked: float, extra: tuple[int, ...]) -> None:
    tensors = [300.0 + extra[index // 5 % 3] for index in range(count)]  # attached anew every five samples
    assert not course_of(tensors, "tensors").grows
    assert course_of([value + leaked * index / count for index, value in enumerate(tensors)], "tensors").grows


@pytest.mark.parametrize("figure", ALLOWED)
def test_one_moment_is_no_growth(figure: str) -> None:
    assert not course_of([1e9] * 30 + [9e9] * 9 + [1e9], figure).grows


def test_differences_name_the_tensor_and_the_first_step() -> None:
    samples = [{"step": step, "loss": "0x1p0"} for step in (10, 20)]
    plain = {"samples": samples, "digest": {"a": "1", "b": "2"}}
    other = {"samples": [samples[0], {"step": 20, "loss": "0x2p0"}], "digest": {"a": "1", "c": "2"}}
    assert differences([plain, plain], [plain, plain]) == []
    (line,) = differences([plain, other], [plain, plain])
    assert line.startswith("rank 1: 2 of 3 values differ (b, c)") and "step 20" in line


def test_a_quarter_of_the_longest_run_sees_the_same_options_at_both_ends() -> None:
    settings = SoakSettings(50_000, "")
    times = settings.steps // settings.attach_every
    assert (settings.sample_every, settings.checkpoint_every, times) == (500, 1000, 20)
    assert (times * 3 // 4) % 3 == 0 and (SoakSettings(2000, "").steps * 3 // 4 // 250) % 3 == 0
