"""`scripts/bench_codes.py`: each operation of each code, by torch, by numba where it is, and a copy."""

import importlib.util
import json
from pathlib import Path

import pytest

import launched


@pytest.mark.xdist_group("bench")
def test_each_operation_is_timed_in_each_way(tmp_path: Path) -> None:
    file = tmp_path / "codes.json"
    small = ("--megabytes", "0.1", "--rounds", "3")
    output = launched.run(launched.SCRIPTS / "bench_codes.py", *small, "--json", file, timeout_s=120)
    rows = json.loads(file.read_text())["rows"]
    assert [(row["codec"], row["operation"]) for row in rows] == [
        *(("int8", operation) for operation in ("encode", "add", "encode sum", "decode")),
        *(("top-k 1%", operation) for operation in ("encode", "add")),
        *(("top-k 1%, exact", operation) for operation in ("encode", "add")),
    ]
    ways = {"torch", "copy"} | ({"numba"} if importlib.util.find_spec("numba") else set())
    for row in rows:
        assert row["ns_per_element"].keys() == ways
        assert all(len(times) == 3 and min(times) > 0 for times in row["ns_per_element"].values())
    assert "copy of as many bytes" in output
