"""`scripts/bench_memory.py`: one mode whose memory is known, over loopback."""

import json
from pathlib import Path

import pytest

import launched


@pytest.mark.nightly
@pytest.mark.xdist_group("bench")
def test_strict_keeps_a_copy_of_each_parameter(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    output = launched.run(launched.SCRIPTS / "bench_memory.py", "--modes", "strict", "--json", file, timeout_s=300)
    ddp, strict = json.loads(file.read_text())["modes"]
    assert (ddp["mode"], strict["mode"]) == ("ddp", "strict") and ddp["resident_beyond"] == 0.0
    # 4 bytes for the copy, and what peers send.
    assert 4.0 <= strict["resident_beyond"] <= 10.0
    assert strict["peak_bytes"] >= strict["resident_bytes"] > ddp["resident_bytes"] > 16 * ddp["parameters"]
    assert f"{strict['resident_beyond']:+.1f}" in output
