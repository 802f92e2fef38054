"""The ranks that load: real processes with their workers, epochs between barriers, and the memory of all of them."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench_data_parts.arms import ARMS, Plan

_MB = 1e6


class Task(NamedTuple):
    """One turn of an arm."""

    arm: str
    pictures: Path
    directory: Path
    workers: int
    batch: int
    epochs: int


class Result(NamedTuple):
    """Seconds of each epoch, and the memory after the last one: that of processes, and files in the page cache."""

    epochs_s: list[float]
    process_mb: float
    file_mb: float | None


def run_ranks(task: Task, ranks: int) -> Result:
    """Run a turn; its cache is removed afterwards."""
    task.directory.mkdir()
    try:
        mp.spawn(_load, (task, ranks), nprocs=ranks)  # type: ignore[no-untyped-call]
        return Result(**json.loads((task.directory / "result.json").read_text()))
    finally:
        shutil.rmtree(task.directory)


def _load(rank: int, task: Task, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task.directory}/store", rank=rank, world_size=ranks)
    cache = task.directory / "cache"
    loading = ARMS[task.arm].make(Plan(task.pictures, cache, task.workers, task.batch))
    epochs_s = []
    for number in range(task.epochs):
        dist.barrier()
        begin_s = time.perf_counter()
        for batch in loading.epoch(number):
            assert batch[0].shape[1:] == (3, 224, 224)
        dist.barrier()
        epochs_s.append(time.perf_counter() - begin_s)
    if rank == 0:
        result = Result(epochs_s, _process_bytes(os.getppid()) / _MB, _resident_mb(cache))
        (task.directory / "result.json").write_text(json.dumps(result._asdict()))
    dist.barrier()  # the workers of all ranks live until here
    dist.destroy_process_group()


def _process_bytes(pid: int) -> int:
    """Memory of a process's children and theirs, without files; what several of them share counts once (PSS)."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in threads for child in path.read_text().split()]
    return sum(_own_bytes(child) + _process_bytes(child) for child in children)


def _own_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _resident_mb(cache: Path) -> float | None:
    """How much of the cache's files is in memory; None without `fincore` (util-linux)."""
    files = [str(path) for path in cache.rglob("*") if path.is_file() and path.stat().st_size]
    if shutil.which("fincore") is None or not files:
        return None if files else 0.0
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    return sum(map(int, done.stdout.split())) / _MB
