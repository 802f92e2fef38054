"""Training scripts as users have them, and how they are started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

TRAIN = """
import hashlib, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1 + dist.get_rank())
    net = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(64, 32), torch.randint(0, 4, (64,)))
    workers = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    loader = DataLoader(data, batch_size=16, shuffle=True, **(workers if "--workers" in sys.argv else {}))
    losses = []
    for epoch in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            BEFORE_STEP
            optimizer.step()
            losses.append(loss)
    ends = [*net.parameters(), torch.stack(losses)]
    bits = hashlib.sha256(b"".join(end.detach().numpy().tobytes() for end in ends)).hexdigest()
    # In one piece: both ranks write to the same pipe.
    os.write(1, " ".join(["bits", str(dist.get_rank()), bits, __name__, *sys.argv[1:]]).encode() + os.linesep.encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def write_script(folder: Path, text: str = TRAIN, before_step: str = "pass") -> Path:
    """The script as a file; `before_step` is a statement in its loop."""
    path = folder / "train_it.py"
    path.write_text(text.replace("BEFORE_STEP", before_step))
    return path


def torchrun(
    *command: str, ranks: int = 2, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a user starts on one node."""
    return _start(torchrun_command(*command, ranks=ranks), folder, environment)


def torchruns_summary(done: subprocess.CompletedProcess[str]) -> str:
    """What torchrun says in its last lines of the rank that failed first."""
    return done.stderr.rpartition("Root Cause")[2]


def torchrun_command(*command: str, ranks: int = 2) -> list[str]:
    """The whole of it."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command]


def python(*command: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a user starts as a single process."""
    return _start([sys.executable, *command], folder, environment)


def _start(
    command: Sequence[str], folder: Path | None, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    # Without a time limit of its own: pytest's ends it, and on a busy machine nine interpreters take long to start.
    return subprocess.run(command, cwd=folder, env=environment_of_user(**environment), capture_output=True, text=True)


def environment_of_user(**more: str) -> dict[str, str]:
    """One in which this checkout is found."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def bits(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """What each rank printed at its end."""
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line.split() for line in done.stdout.splitlines() if line.startswith("bits"))
