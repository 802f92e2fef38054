"""Run a check on fresh processes, one per rank, with a hard time limit.

What ranks print is shown when something fails. A check may hand over what it has measured as it goes: what it has
handed over is kept if it is cut short. Knows nothing of what a check does.
"""

import inspect
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from bench_kit.rank_processes import RankProcesses

# A leg that hangs ends by itself after this, and then says which one it was.
GROUP_TIMEOUT_S = 40.0

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
    tasks = [(_Task(check, arguments, launch, rank),) for rank in range(len(launch.devices))]
    ranks = _Ranks(RankProcesses(_rank_main, tasks), launch, on_figures)
    try:
        result, detail = ranks.collect(start_s + timeout_s)
    finally:
        ranks.processes.end()
    return Outcome(result, ranks.known_figures(), detail, time.monotonic() - start_s)


class _Ranks:
    """The processes of one check, and what they have answered."""

    def __init__(self, processes: RankProcesses, launch: Launch, on_figures: OnFigures | None) -> None:
        self.processes = processes
        self._launch = launch
        self._on_figures = on_figures
        self._all = range(len(launch.devices))
        self._figures: list[Figures] = [{} for _ in self._all]
        self._heard_s = [time.monotonic() for _ in self._all]

    def known_figures(self) -> list[Figures]:
        """The figures of each rank so far; empty if no rank has any."""
        return self._figures if any(self._figures) else []

    def collect(self, deadline_s: float) -> tuple[str, str]:
        """Wait for all ranks; returns the result and its reason, which has what they have printed if they failed."""
        result, detail = self._collect(deadline_s)
        if result == "FAIL":
            detail += self.processes.output(self._all)
        return result, detail

    def _collect(self, deadline_s: float) -> tuple[str, str]:
        open_ranks = set(self._all)
        while open_ranks:
            messages = self.processes.receive(sorted(open_ranks), deadline_s)
            if not messages:
                return "FAIL", f"ranks {sorted(open_ranks)} still ran at the time limit of this case"
            for rank, message in messages.items():
                if message is None:
                    how = self._how_it_died(rank)
                    if self._launch.victim is None:
                        return "FAIL", f"rank {rank} died, {how}"
                    silent_s = time.monotonic() - self._heard_s[rank]
                    message = "ok", self._figures[rank] | {"died": how, "died_after_s": silent_s}
                result, value = message
                if result in ("skip", "FAIL"):
                    return result, value if result == "skip" else f"rank {rank} failed:\n{value}"
                self._take(rank, value)
                if result == "ok":
                    open_ranks.discard(rank)
        return self._exits()

    def _take(self, rank: int, figures: Figures) -> None:
        self._figures[rank] = figures
        self._heard_s[rank] = time.monotonic()
        if self._on_figures is not None:
            self._on_figures(self._figures)

    def _exits(self) -> tuple[str, str]:
        for rank in self._all:
            exitcode = self.processes.exitcode(rank)
            if exitcode != 0 and self._launch.victim is None:
                state = "did not exit" if exitcode is None else f"exited with {exitcode}"
                return "FAIL", f"rank {rank} had finished its check, but its process {state}"
        return "ok", ""

    def _how_it_died(self, rank: int) -> str:
        code = self.processes.exitcode(rank)
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return f"exit code {code}{name}"


def _rank_main(pipe: Connection, directory: Path, task: _Task) -> None:
    answer: tuple[str, Figures | str]
    try:
        answer = ("ok", _run(task, pipe, directory))
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


def _run(task: _Task, pipe: Connection, directory: Path) -> Figures:
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
        init_method=f"file://{directory}/rendezvous",
        rank=task.rank,
        world_size=len(launch.devices),
        timeout=timedelta(seconds=launch.group_timeout_s),
        device_id=device if launch.bind_device and device.type == "cuda" else None,
    )
    found: Any = task.check(device, *task.arguments)
    if not inspect.isgenerator(found):
        return dict(found)
    figures: Figures = {}
    for figures in cast(Iterator[Figures], found):
        pipe.send(("so far", figures))
    return figures
