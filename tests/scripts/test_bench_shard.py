"""`scripts/bench_shard.py`: tiny runs of time and memory, what it makes of their figures, bad input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import bench_shard
import lab
from bench_shard_parts import memory, options, report
from bench_shard_parts.ratios import with_ratios
from bench_shard_parts.settings import MemorySettings

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 450
TINY_TIMES = "--parameters 400000 --blocks 2 --weights-per-block 2 --buckets 1 --rounds 2 --steps-per-round 1"
TINY_MEMORY = "--memory --ranks 2 --layers 2 --width 512 --steps 1 --repeats 1"


def run(given: str, json_file: Path, cwd: Path = ROOT) -> tuple[int, dict[str, Any], str]:
    """The exit code, the record and what was printed."""
    job = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "bench_shard.py"), *given.split(), "--json", str(json_file)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}, cwd=cwd,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        job.terminate()  # it ends its ranks
        output, _ = job.communicate()
        pytest.fail(f"no end within {RUN_TIMEOUT_S} s:\n{output}")
    assert json_file.exists(), output
    return job.returncode, json.loads(json_file.read_text()), output


@pytest.mark.nightly
def test_memory_of_ddp_and_zero(tmp_path: Path) -> None:
    code, record, output = run(f"{TINY_MEMORY} --arms zero", tmp_path / "memory.json")
    assert code == 0, output
    ddp, zero = record["cases"]
    assert (ddp["arm"], zero["arm"]) == ("ddp", "zero") and record["configuration"]["parameters"] == 2 * 512 * 513
    # Two moments of each parameter, and for each tensor a step counter.
    assert ddp["optimizer_state_bytes"]["median"] == 2 * 4 * 2 * 512 * 513 + 4 * 4
    assert zero["state_share"] == pytest.approx(0.5, abs=0.01)
    assert [len(case["repeats"]) for case in record["cases"]] == [1, 1]
    for case in record["cases"]:
        assert all(rank["peak_rss_bytes"] >= rank["rss_bytes"] for ranks in case["repeats"] for rank in ranks)
        # Weights, gradients and optimizer state; this is small enough for what else a process does to show.
        held_bytes = 2 * 4 * 2 * 512 * 513 + case["optimizer_state_bytes"]["median"]
        assert 0.5 * held_bytes < case["rss_bytes"]["median"] < 3 * held_bytes + 2**24
        row = next(line.split() for line in output.splitlines() if line.split()[:2] == ["2", case["arm"]])
        assert row[2:4] == [f"{case['optimizer_state_bytes']['median'] / 2**20:.1f}", f"{case['state_share']:.3f}"]


@pytest.mark.nightly
def test_memory_of_a_sharded_optimizer(tmp_path: Path) -> None:
    code, record, output = run(f"{TINY_MEMORY} --arms shard", tmp_path / "memory.json")
    assert code == 0, output
    assert record["cases"][1]["state_share"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.nightly
@pytest.mark.skipif(lab.why_no_lab() is not None, reason="needs the rights to build a lab")
def test_times_on_the_lab(tmp_path: Path) -> None:
    # A directory with another package of that name must not take the place of the one that is measured.
    (tmp_path / "ddp_crossover.py").write_text("raise ImportError('not this one')")
    code, record, output = run(f"{TINY_TIMES} --arms auto,zero,fsdp2", tmp_path / "shard.json", cwd=tmp_path)
    assert code == 0, output
    (case,) = record["cases"]
    assert [arm["arm"] for arm in case["arms"]] == ["noop", "auto", "zero@1", "fsdp2"]
    assert record["configuration"]["optimizer"] == case["settings"]["optimizer"] == "adamw"
    assert record["configuration"]["is_network_measurement"] and case["best_zero"] == "zero@1"
    noop, auto, *peers = case["arms"]
    assert noop["sent_bytes"]["median"] < 0.1 * case["gradient_bytes"] < auto["sent_bytes"]["median"]
    for arm in peers:
        assert len(arm["rounds_s"]) == 2 and arm["over"]["auto"]["median"] > 0 and arm["over"]["shard"] is None
        row = next(line.split() for line in output.splitlines() if line.split()[:1] == [arm["arm"]])
        assert row[1] == f"{1e3 * arm['step_s']['median']:.1f}" and row[3] == f"{arm['over_bound']['median']:.3f}"
        assert row[-1] == f"{arm['sent_bytes']['median'] / 1e6:.1f}"


def test_without_a_lab_it_says_why_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench_shard.main(["--quick"]) == 2
    assert "`ip`" in (error := capsys.readouterr().err) and "--memory" in error


def arm_case(name: str, rounds_s: list[float], **others: Any) -> dict[str, Any]:
    spread = {"median": sorted(rounds_s)[len(rounds_s) // 2], "low": 0.0, "high": 9.0}
    return {
        "arm": name, "refused": None, "rounds_s": rounds_s, "step_s": spread, "over_bound": spread, "sent_bytes": None,
    } | others  # fmt: skip


CASE: dict[str, Any] = {
    "case": "paced", "parameters": 10, "tensors": 2, "hosts": 2, "gradient_bytes": 40_000_000,
    "all_reduce_best_s": 1.0, "all_reduce_median_s": 1.0, "compute_s": 1.0, "ratio_measured": 1.0, "bound_s": 1.0,
    "best_ddp": None,
    "arms": [
        arm_case("auto", [1.0, 1.0, 4.0, 1.0, 1.0]),
        arm_case("shard", [1.2, 1.2, 4.8, 1.2, 1.0]),
        arm_case("zero", [2.0, 2.0, 8.0, 2.0, 2.0], sent_bytes={"median": 60e6, "low": 60e6, "high": 60e6}),
        arm_case("zero@1", [1.5, 1.8, 6.0, 1.6, 1.5]),
        {"arm": "fsdp2", "refused": "not here"},
    ],
}  # fmt: skip


def test_ratios_are_taken_within_a_round() -> None:
    case = with_ratios(CASE)
    auto, shard, zero, _, refused = case["arms"]
    # The third round is slow for all of them.
    assert shard["over"]["auto"]["median"] == pytest.approx(1.2) and shard["over"]["auto"]["at_least"] == 1.0
    assert zero["over"]["auto"]["low"] == zero["over"]["auto"]["high"] == pytest.approx(2.0)
    assert zero["over"]["shard"]["median"] == pytest.approx(2 / 1.2)
    assert auto["over"]["auto"] is None and refused["over"] == {"auto": None, "shard": None}
    assert case["best_zero"] == "zero@1"


def test_the_table_of_times_fits_100_columns() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    report.print_times(console, with_ratios(CASE), "a network")
    lines = console.export_text().splitlines()
    # The lines above and below the table are text, which a terminal wraps.
    table = [line for line in lines if line.split()[:1] in (["arm"], ["auto"], ["shard"], ["zero"]) or "───" in line]
    assert len(table) == 5 and all(len(line) <= 100 for line in table)
    (row,) = (line.split() for line in lines if line.split()[:1] == ["zero"])
    assert row[-2:] == ["1.67", "60.0"]
    assert any("fsdp2: not here" in line for line in lines) and any("sends 40.0" in line for line in lines)


def test_an_arm_that_cannot_run_is_named_and_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_shard, "measure", lambda *_: CASE)
    assert bench_shard.main(["--no-lab"]) == 1
    assert "bench_shard: fsdp2: not here" in capsys.readouterr().err
    monkeypatch.setattr(memory, "measure", lambda *_: {"refused": "no such option", "figures": []})
    assert bench_shard.main(["--memory", "--ranks", "2", "--arms", "shard"]) == 1
    assert "bench_shard: shard on 2 ranks: no such option" in capsys.readouterr().err


def test_memory_is_that_of_the_fullest_rank_and_beside_that_of_ddp() -> None:
    def ranks(state: int, *rss: int) -> list[dict[str, Any]]:
        return [{"optimizer_state_bytes": state, "rss_bytes": each, "peak_rss_bytes": 2 * each} for each in rss]

    def settings(arm: str) -> MemorySettings:
        return MemorySettings(arm, 2, "adamw", layers=1, width=8, rows=1, steps=1)

    measured = {
        settings("ddp"): [ranks(100, 500, 510), ranks(100, 520, 500), ranks(100, 505, 505)],
        settings("shard"): [ranks(50, 400, 460), ranks(50, 450, 440), ranks(50, 470, 400)],
        settings("zero"): [],
    }
    ddp, shard, zero = memory.summarize(measured, {settings("zero"): "refused"})
    assert ddp["rss_bytes"] == {"median": 510, "low": 505, "high": 520} and ddp["state_share"] == 1
    assert shard["rss_bytes"] == {"median": 460, "low": 450, "high": 470} and shard["state_share"] == 0.5
    assert shard["beyond_ddp"] == {"optimizer_state_bytes": -50, "rss_bytes": -50, "peak_rss_bytes": -100}
    assert zero["refused"] == "refused" and "rss_bytes" not in zero


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--arms auto,fast", "'fast'"),
        ("--optimizer adam", "'adam'"),
        ("--memory --arms ddp@0", "ddp@0"),
        ("--memory --ranks 1,2", "1,2: give whole numbers from 2 on"),
        ("--memory --ranks two", "two: give whole numbers"),
        ("--memory --repeats 0", "--repeats"),
        ("--memory --rounds 3", "--rounds"),
        ("--ranks 2", "--ranks"),
        ("--parameters 1000", "1000 parameters"),
    ],
)
def test_bad_input_is_refused_by_name(given: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_of:
        options.parse_args("", given.split())
    assert exit_of.value.code == 2 and named in capsys.readouterr().err


def test_zero_runs_with_each_bucket_size_and_ddp_always_has_its_memory_measured() -> None:
    assert options.parse_args("", ["--arms", "zero,ddp@2", "--buckets", "25,1"]).arms == [
        "noop", "zero", "zero@1", "ddp@2",
    ]  # fmt: skip
    assert options.parse_args("", ["--memory", "--arms", "shard,ddp"]).arms == ["ddp", "shard"]
