"""Whether NVIDIA's Multi-Process Service runs, which lets kernels of several processes run at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

_DEFAULT_DIRECTORY = "/tmp/nvidia-mps"

WITHOUT_MPS = (
    "without NVIDIA's MPS the kernels of NCCL, which spin while they wait for other ranks, share the GPU with another "
    "job in slices, so that job gets about half of each gap: start nvidia-cuda-mps-control -d before the jobs, or let "
    'legs travel over gloo with process_group=dist.new_group(backend="gloo")'
)


def mps_runs(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether there is a control daemon in whose directory this process would look for one.

    Source: NVIDIA's Multi-Process Service, "Environment variables".
    """
    control = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", _DEFAULT_DIRECTORY), "control")
    try:
        mode = control.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
