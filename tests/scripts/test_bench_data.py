"""`scripts/bench_data.py`: a tiny run of all arms that are here, and bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bench_data
from bench_data_parts.arms import ARMS, why_not

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_a_tiny_run(tmp_path: Path) -> None:
    given = "--pictures 24 --width 320 --height 280 --batch 4 --rounds 1 --epochs 2 --arms live,kept,cached"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_data.py", *given.split(), "--json", tmp_path / "data.json"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "data.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == ["live", "kept", "cached"]
    assert all(len(row["epochs_s"][0]) == 2 and row["process_mb"][0] > 50 for row in rows)
    assert rows[0]["file_mb"] == [0.0]
    if rows[2]["file_mb"] != [None]:
        assert rows[2]["file_mb"][0] > 24 * 3 * 256 * 256 / 1e6  # the samples, once
    assert "24 JPEGs of 320 x 280" in done.stdout and "cached" in done.stdout


def test_an_arm_whose_package_is_missing_says_so() -> None:
    missing = [name for name in ARMS if why_not(name)]
    assert set(missing) <= {"litdata"}
    assert all("pip install litdata" in str(why_not(name)) for name in missing)


@pytest.mark.parametrize(
    ("given", "named"), [("--arms all", "choose from live"), ("--epochs 1", "--epochs must be 2 or more")]
)
def test_bad_input_is_named(given: str, named: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_data.py", *given.split()])
    with pytest.raises(SystemExit):
        bench_data.main()
    assert named in capsys.readouterr().err
