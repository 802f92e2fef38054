"""Run a check on fresh processes, one per rank, with a hard time limit.

Ranks meet through a file in a private temporary directory. What they print goes to a file there, and is shown when
something fails. Knows nothing of what a check does.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# A leg that hangs ends by itself after this, and then says which one it was.
GROUP_TIMEOUT_S = 40.0
EXIT_TIMEOUT_S = 20.0
_LOG_TAIL_CHARACTERS = 4000
_PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "ddp_crossover"]


class Skipped(Exception):
    """A check cannot be done here; the message says why."""


@dataclass(frozen=True)
class Launch:
    """How the ranks of one check are started.

    Attributes:
        backend: of the process group.
        devices: of each rank, such as ``("cuda:0", "cuda:0")``.
        environment: variables for every rank; ``{rank}`` in a value becomes the rank.
        bind_device: pass ``device_id`` to ``init_process_group``, so that new groups split NCCL's communicator.
    """

    backend: str
    devices: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    bind_device: bool = False


class Outcome(NamedTuple):
    """How a check ended: ``ok``, ``FAIL`` or ``skip``; the figures of each rank; the reason."""

    result: str
    figures: list[dict[str, Any]]
    detail: str
    seconds: float


class _Task(NamedTuple):
    """The arguments of one rank."""

    check: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]
    launch: Launch
    rank: int
    directory: str
    timeout_s: float


def run_check(
    check: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], launch: Launch, timeout_s: float
) -> Outcome:
    """Run ``check(device, *arguments)`` on every rank; the first rank that fails ends the others."""
    start_s = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # mkdtemp makes it 0700: a process that can write the rendezvous file can join the group.
    directory = tempfile.mkdtemp(prefix="gpu-check-")
    pipes: list[Connection] = []
    processes: list[Any] = []
    result, figures, detail = "FAIL", [], ""
    try:
        for rank in range(len(launch.devices)):
            ours, theirs = context.Pipe(duplex=False)
            task = _Task(check, arguments, launch, rank, directory, timeout_s)
            process = context.Process(target=_rank_main, args=(theirs, task), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        result, figures, detail = _collect(pipes, processes, start_s + timeout_s)
        if result == "FAIL":
            detail += _logs(directory, len(processes))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(directory, ignore_errors=True)
    return Outcome(result, figures, detail, time.monotonic() - start_s)


def _collect(pipes: list[Connection], processes: list[Any], deadline_s: float) -> tuple[str, list[dict[str, Any]], str]:
    figures: dict[int, dict[str, Any]] = {}
    while len(figures) < len(pipes):
        waiting = [rank for rank in range(len(pipes)) if rank not in figures]
        ready = wait([pipes[rank] for rank in waiting], max(deadline_s - time.monotonic(), 0.0))
        if not ready:
            return "FAIL", [], f"ranks {waiting} still ran at the time limit of this case"
        for rank in (rank for rank in waiting if pipes[rank] in ready):
            try:
                result, value = pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                processes[rank].join(EXIT_TIMEOUT_S)
                return "FAIL", [], f"rank {rank} died, exit code {processes[rank].exitcode}"
            if result != "ok":
                return result, [], value if result == "skip" else f"rank {rank} failed:\n{value}"
            figures[rank] = value
    for rank, process in enumerate(processes):
        process.join(EXIT_TIMEOUT_S)
        if process.exitcode != 0:
            state = "did not exit" if process.exitcode is None else f"exited with {process.exitcode}"
            return "FAIL", [], f"rank {rank} had finished its check, but its process {state}"
    return "ok", [figures[rank] for rank in range(len(pipes))], ""


def _logs(directory: str, ranks: int) -> str:
    texts = []
    for rank in range(ranks):
        with contextlib.suppress(OSError):
            text = _log_file(directory, rank).read_text(errors="replace").strip()
            if text:
                texts.append(f"\n--- output of rank {rank}:\n{text[-_LOG_TAIL_CHARACTERS:]}")
    return "".join(texts)


def _log_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"rank{rank}.log"


def _rank_main(pipe: Connection, task: _Task) -> None:
    log = os.open(_log_file(task.directory, task.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    # Shows where a rank hangs, shortly before it is killed for that.
    faulthandler.dump_traceback_later(max(task.timeout_s - 3.0, 1.0))
    try:
        answer = ("ok", _run(task))
    except Skipped as reason:
        answer = ("skip", str(reason))
    except BaseException:
        answer = ("FAIL", traceback.format_exc())
    pipe.send(answer)
    if answer[0] != "ok":
        os._exit(1)  # a process group with a broken leg may take its time to go
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(task: _Task) -> dict[str, Any]:
    launch = task.launch
    # Read by cuBLAS, NCCL and gloo when they are first used, so not too late.
    os.environ.update({name: value.format(rank=task.rank) for name, value in launch.environment.items()})
    device = torch.device(launch.devices[task.rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        launch.backend,
        init_method=f"file://{task.directory}/rendezvous",
        rank=task.rank,
        world_size=len(launch.devices),
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        device_id=device if launch.bind_device and device.type == "cuda" else None,
    )
    return task.check(device, *task.arguments)
