"""`scripts/pytorch_ddp_tests.py`: a few of PyTorch's tests; all of them take minutes, and are run by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import launched

TIMEOUT_S = 450


@pytest.mark.xdist_group("pytorch_ddp_tests")
def test_tests_of_pytorch_run_with_and_without_us(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    record = tmp_path / "tests.json"
    given = ("--only", "grad_div_uneven_inputs", "--json", record, "--timeout", "20")
    launched.run(launched.SCRIPTS / "pytorch_ddp_tests.py", *given, timeout_s=TIMEOUT_S)
    rows = {row["test"]: row for row in json.loads(record.read_text())}
    row = rows["test_ddp_grad_div_uneven_inputs"]
    assert row["plain"]["result"] == "passed"
    assert row["attached"]["result"] == "failed"
    assert "join" in row["attached"]["reason"]
    assert row["documented"]
