"""The page that explains DeAR is a program, and it is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOY = Path(__file__).resolve().parent.parent / "docs" / "toy_dear.py"


def test_the_toy_trains_as_plain_ddp_does() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(TOY)]
    job = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    assert "difference to plain DDP" in job.stdout
