"""A script for torchrun that saves every other step and goes on from there when it is started again.

torchrun --max-restarts 1 ... elastic_script.py plain|attached DIRECTORY none|killed
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from restart_training import ALL_STEPS, build, end, load, save, train

KILLED_AT = 9


def main(arm: str, directory: str, fault: str) -> None:
    """One rank: train, be killed once, write what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(directory)
    started_at = folder / "step"
    first = int(started_at.read_text()) if started_at.exists() else 0
    training = build(arm == "attached", partial(load, directory) if first else None)
    for step in range(first, ALL_STEPS):
        if fault == "killed" and rank == 1 and step == KILLED_AT and not (folder / "was-killed").exists():
            (folder / "was-killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train(training, step, step + 1)
        if step % 2 == 0:
            save(training, directory)
            if rank == 0:
                started_at.write_text(str(step + 1))
    torch.save(end(training), folder / f"end-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
