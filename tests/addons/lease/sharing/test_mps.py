"""Whether MPS runs is read from the directory that CUDA itself would look into."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_crossover.addons.lease.sharing.lease_holder import mps_runs


def test_a_control_daemon_has_a_pipe_in_its_directory(tmp_path: Path) -> None:
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps")}
    assert not mps_runs(environ), "there is no directory"
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()
    assert not mps_runs(environ), "a file is no pipe"
    (tmp_path / "mps" / "control").unlink()
    os.mkfifo(tmp_path / "mps" / "control")
    assert mps_runs(environ)
