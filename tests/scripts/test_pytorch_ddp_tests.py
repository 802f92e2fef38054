"""`scripts/pytorch_ddp_tests.py`: a few of PyTorch's tests; all of them take minutes, and are run by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 450


@pytest.mark.xdist_group("pytorch_ddp_tests")
def test_tests_of_pytorch_run_with_and_without_us(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    record = tmp_path / "tests.json"
    script = ROOT / "scripts" / "pytorch_ddp_tests.py"
    printed = subprocess.run(
        [sys.executable, str(script), "--only", "grad_div_uneven_inputs", "--json", str(record), "--timeout", "20"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    rows = {row["test"]: row for row in json.loads(record.read_text())}
    row = rows["test_ddp_grad_div_uneven_inputs"]
    assert row["plain"]["result"] == "passed"
    assert row["attached"]["result"] == "failed"
    assert "join" in row["attached"]["reason"]
    assert row["documented"]
    assert printed.returncode == 0, printed.stdout + printed.stderr
