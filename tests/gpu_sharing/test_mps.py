"""Whether MPS runs is read from the directory that CUDA itself would look into."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_crossover.gpu_sharing.lease_holder import mps_runs


def test_a_control_daemon_has_a_pipe_in_its_directory(tmp_path: Path) -> None:
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not mps_runs(environ)
    (tmp_path / "control").touch()
    assert not mps_runs(environ), "a file is no pipe"
    (tmp_path / "control").unlink()
    os.mkfifo(tmp_path / "control")
    assert mps_runs(environ)


def test_an_unreadable_directory_has_none(tmp_path: Path) -> None:
    assert not mps_runs({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "missing")})
