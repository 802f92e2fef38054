"""A gather leg has not ended while a peer still takes our slice: whoever waited for it may write into the buffer."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.nccl.make_link import make_link
from harness import run_ranks

NUMEL = 2**24  # 64 MiB: more than sockets hold
PATIENCE_S = 20.0


def _gather_to_a_stopped_peer(directory: str) -> tuple[bool, bool]:
    """Rank 0: whether its gather leg was done while rank 1 was stopped, and whether rank 1 got what was sent."""
    rank, pid_file = dist.get_rank(), Path(directory) / "pid"
    link = make_link(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=60))
    buffer = torch.full((NUMEL,), 1.0 + rank)
    link.begin_iteration()
    scatter = link.reduce_scatter(0, FusionBuffer((buffer,)))
    scatter.wait()
    if rank == 1:
        gather = link.all_gather(scatter)
        time.sleep(0.5)  # until our slice has left
        pid_file.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        gather.wait()
        was_done = False
    else:
        pid = _pid_of_the_stopped(pid_file)
        gather = link.all_gather(scatter)
        time.sleep(0.5)
        if was_done := gather.is_done():
            buffer.zero_()  # as a clipping factor of 0 would
        os.kill(pid, signal.SIGCONT)
        gather.wait()
    dist.barrier()
    is_right = bool((buffer == 3.0).all())
    link.close()
    return was_done, is_right


def _pid_of_the_stopped(file: Path) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if file.exists() and (pid := file.read_text()):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T":
                return int(pid)
        time.sleep(0.01)
    raise AssertionError("rank 1 has not stopped itself")


def test_a_gather_leg_lasts_until_the_peer_has_our_slice(tmp_path: Path) -> None:
    assert run_ranks(_gather_to_a_stopped_peer, 2, str(tmp_path)) == [(False, True), (False, True)]
