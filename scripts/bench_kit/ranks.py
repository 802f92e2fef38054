"""Run a check on fresh processes, one per rank, with a hard time limit.

Ranks meet through a file in a private temporary directory. What they print goes to a file there, and is shown when
something fails. A check may hand over what it has measured as it goes: what it has handed over is kept if it is cut
short. Knows nothing of what a check does.
"""

import contextlib
import ctypes
import faulthandler
import inspect
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
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
_PR_SET_PDEATHSIG = 1

Figures = dict[str, Any]
"""What one rank has measured, in types that JSON has."""
OnFigures = Callable[[list[Figures]], None]
"""Called with the figures of all ranks so far, whenever a rank hands some over."""


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
        set_device: make the rank's device torch's current one.
        group_timeout_s: timeout of the process group.
        victim: a rank that kills itself during the check. How the other ranks end is then a figure, whatever it is.
    """

    backend: str
    devices: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    bind_device: bool = False
    set_device: bool = True
    group_timeout_s: float = GROUP_TIMEOUT_S
    victim: int | None = None


class Outcome(NamedTuple):
    """How a check ended: ``ok``, ``FAIL`` or ``skip``; the figures of each rank so far; the reason."""

    result: str
    figures: list[Figures]
    detail: str
    seconds: float


class _Task(NamedTuple):
    check: Callable[..., Figures | Iterator[Figures]]
    arguments: tuple[Any, ...]
    launch: Launch
    rank: int
    directory: str
    timeout_s: float


def run_check(
    check: Callable[..., Figures | Iterator[Figures]],
    arguments: tuple[Any, ...],
    launch: Launch,
    timeout_s: float,
    on_figures: OnFigures | None = None,
) -> Outcome:
    """Run ``check(device, *arguments)`` on every rank; the first rank that fails ends the others.

    A check returns its figures, or yields them again and again as they grow; the last ones count.
    """
    start_s = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # mkdtemp makes it 0700: a process that can write the rendezvous file can join the group.
    directory = tempfile.mkdtemp(prefix="gpu-check-")
    ranks = _Ranks(launch, on_figures)
    result, detail = "FAIL", ""
    try:
        for rank in range(len(launch.devices)):
            ours, theirs = context.Pipe(duplex=False)
            task = _Task(check, arguments, launch, rank, directory, timeout_s)
            process = context.Process(target=_rank_main, args=(theirs, task), daemon=True)
            process.start()
            theirs.close()
            ranks.add(ours, process)
        result, detail = ranks.collect(start_s + timeout_s)
        if result == "FAIL":
            detail += _logs(directory, len(launch.devices))
    finally:
        ranks.end()
        shutil.rmtree(directory, ignore_errors=True)
    return Outcome(result, ranks.known_figures(), detail, time.monotonic() - start_s)


class _Ranks:
    """The processes of one check, and what they have answered."""

    def __init__(self, launch: Launch, on_figures: OnFigures | None) -> None:
        self._launch = launch
        self._on_figures = on_figures
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._figures: list[Figures] = []
        self._heard_s: list[float] = []

    def add(self, pipe: Connection, process: Any) -> None:
        self._pipes.append(pipe)
        self._processes.append(process)
        self._figures.append({})
        self._heard_s.append(time.monotonic())

    def known_figures(self) -> list[Figures]:
        """The figures of each rank so far; empty if no rank has any."""
        return self._figures if any(self._figures) else []

    def collect(self, deadline_s: float) -> tuple[str, str]:
        """Wait for all ranks; returns the result and its reason."""
        open_ranks = set(range(len(self._pipes)))
        while open_ranks:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            ready = wait([self._pipes[rank] for rank in sorted(open_ranks)], left_s)
            if not ready:
                return "FAIL", f"ranks {sorted(open_ranks)} still ran at the time limit of this case"
            for rank in [rank for rank in sorted(open_ranks) if self._pipes[rank] in ready]:
                try:
                    result, value = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    how = self._how_it_died(rank)
                    if self._launch.victim is None:
                        return "FAIL", f"rank {rank} died, {how}"
                    silent_s = time.monotonic() - self._heard_s[rank]
                    result, value = "ok", self._figures[rank] | {"died": how, "died_after_s": silent_s}
                if result in ("skip", "FAIL"):
                    return result, value if result == "skip" else f"rank {rank} failed:\n{value}"
                self._take(rank, value)
                if result == "ok":
                    open_ranks.discard(rank)
        return self._exits()

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def _take(self, rank: int, figures: Figures) -> None:
        self._figures[rank] = figures
        self._heard_s[rank] = time.monotonic()
        if self._on_figures is not None:
            self._on_figures(self._figures)

    def _exits(self) -> tuple[str, str]:
        for rank, process in enumerate(self._processes):
            process.join(EXIT_TIMEOUT_S)
            if process.exitcode != 0 and self._launch.victim is None:
                state = "did not exit" if process.exitcode is None else f"exited with {process.exitcode}"
                return "FAIL", f"rank {rank} had finished its check, but its process {state}"
        return "ok", ""

    def _how_it_died(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(EXIT_TIMEOUT_S)
        code = process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return f"exit code {code}{name}"


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
    _end_with_parent()
    log = os.open(_log_file(task.directory, task.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    # Shows where a rank hangs, shortly before it is killed for that.
    faulthandler.dump_traceback_later(max(task.timeout_s - 3.0, 1.0))
    answer: tuple[str, Figures | str]
    try:
        answer = ("ok", _run(task, pipe))
    except Skipped as reason:
        answer = ("skip", str(reason))
    except BaseException:
        answer = ("FAIL", traceback.format_exc())
    pipe.send(answer)
    if answer[0] != "ok" or task.launch.victim is not None:
        pipe.close()
        os._exit(answer[0] != "ok")  # a process group with a broken leg may take its time to go
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """A rank must not occupy the device once the check that started it has been killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(task: _Task, pipe: Connection) -> Figures:
    launch = task.launch
    # Read by cuBLAS, NCCL and gloo when they are first used, so not too late.
    os.environ.update({name: value.format(rank=task.rank) for name, value in launch.environment.items()})
    device = torch.device(launch.devices[task.rank])
    if device.type != "cuda":
        torch.set_num_threads(1)
    elif launch.set_device:
        torch.cuda.set_device(device)
    dist.init_process_group(
        launch.backend,
        init_method=f"file://{task.directory}/rendezvous",
        rank=task.rank,
        world_size=len(launch.devices),
        timeout=timedelta(seconds=launch.group_timeout_s),
        device_id=device if launch.bind_device and device.type == "cuda" else None,
    )
    found: Any = task.check(device, *task.arguments)
    if not inspect.isgenerator(found):
        return dict(found)
    figures: Figures = {}
    for figures in found:
        pipe.send(("so far", figures))
    return figures
