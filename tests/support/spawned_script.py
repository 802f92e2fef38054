"""A script that starts its ranks by `torch.multiprocessing.spawn` and lets them meet in a file.

python spawned_script.py plain|attached DIRECTORY
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from restart_training import ALL_STEPS, build, end, train


def rank_main(rank: int, arm: str, directory: str) -> None:
    """One rank: train, and write what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/store", timedelta(seconds=60), 2, rank)
    training = build(arm == "attached")
    train(training, 0, ALL_STEPS)
    torch.save(end(training), f"{directory}/end-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank_main, args=tuple(sys.argv[1:]), nprocs=2)
