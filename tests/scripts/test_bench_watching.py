"""`scripts/bench_watching.py`: how many steps are watched, and that each of its columns was measured."""

import json
from pathlib import Path

import pytest

import launched


@pytest.mark.xdist_group("bench")
def test_two_steps_are_watched(tmp_path: Path) -> None:
    file = tmp_path / "watching.json"
    small = ("--models", "transformer", "--rounds", "1", "--steps", "10", "--batch-size", "1")
    output = launched.run(launched.SCRIPTS / "bench_watching.py", *small, "--json", file, timeout_s=120)
    [row] = json.loads(file.read_text())["models"]
    assert row["watched_steps"] == 2
    assert all(row[key]["median"] > 0 for key in ("attach_ms", "watched_ms", "later_ms"))
    assert row["plain_ms"] > 0
    assert "watched steps" in output
