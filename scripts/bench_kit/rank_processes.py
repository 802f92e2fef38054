"""Processes that are the ranks of one job: starts them, hears what they say, keeps what they print, ends them.

Each rank calls a function, with a pipe to this process. What it prints goes to a file, and so do the stacks of its
threads, when it crashes and when they are asked for. Knows nothing of what ranks do, and needs no torch itself.
"""

import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# How long ranks may take to leave once they have done what they were to do.
EXIT_TIMEOUT_S = 20.0
# What ranks import in any case: the server that forks them does so once, in seconds.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # DDP and every optimizer import it on first use
    "ddp_crossover.comm_hook",
]
_DUMP_SIGNAL = signal.SIGUSR1
_DUMP_S = 0.5
_TAIL_BYTES = 4000
_PR_SET_PDEATHSIG = 1


class RankProcesses:
    """Ranks that run, until `end()`, which has to be called.

    Args:
        main: each rank calls `main(pipe, directory, *arguments[rank])`.
        arguments: of each rank.
        start_method: of `multiprocessing`. "forkserver" forks a process that has imported torch, in 20 ms instead of 4
            s. "spawn" gives each rank a complete interpreter, which leaves as a user's does (atexit handlers,
            destructors). "fork" hands on what this process has made.
        have_children: whether ranks may use `multiprocessing` themselves.

    Attributes:
        directory: a folder that only this user may enter, for a file through which ranks meet: who can write it can
            join their group. It is removed in the end.
    """

    def __init__(
        self,
        main: Callable[..., None],
        arguments: Sequence[tuple[Any, ...]],
        *,
        start_method: str = "forkserver",
        have_children: bool = False,
    ) -> None:
        context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-"))  # mkdtemp makes it 0700
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        try:
            for rank, of_rank in enumerate(arguments):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                process = context.Process(
                    target=_rank_main,
                    args=(main, theirs, self._output(rank), (self.directory, *of_rank)),
                    name=f"rank {rank} of {len(arguments)}",
                    daemon=not have_children,
                )
                process.start()
                self._processes.append(process)
                theirs.close()
        except BaseException:
            self.end()
            raise

    def send(self, message: Any) -> None:
        """Tell all ranks the same. Raises OSError if one has ended."""
        for pipe in self._pipes:
            pipe.send(message)

    def receive(self, ranks: Iterable[int], deadline_s: float) -> dict[int, Any]:
        """Wait until some of these ranks have said something; returns the next message of each that has.

        None instead of a message: the rank has closed its pipe, mostly by dying. No message at all: it is
        `deadline_s` by `time.monotonic()`.
        """
        pipes = {self._pipes[rank]: rank for rank in ranks}
        ready = wait(list(pipes), max(deadline_s - time.monotonic(), 0.0))
        return {rank: _next_message(pipe) for pipe, rank in pipes.items() if pipe in ready}

    def has_exited(self, rank: int) -> bool:
        """Whether the rank's process has ended by now."""
        return not self._processes[rank].is_alive()

    def exitcode(self, rank: int, timeout_s: float | None = None) -> int | None:
        """0, a number that stands for an error, minus that of a signal; or None if it has not exited in time.

        Args:
            rank: which one.
            timeout_s: how long it may take; None: `EXIT_TIMEOUT_S`.
        """
        self._processes[rank].join(EXIT_TIMEOUT_S if timeout_s is None else timeout_s)
        return self._processes[rank].exitcode

    def output(self, ranks: Iterable[int], *, stacks: bool = True) -> str:
        """What these ranks have printed last, and where the threads are of those that still run (`stacks`)."""
        printed = {rank: self._printed(rank) for rank in ranks}
        running = [self._processes[rank].pid for rank in printed if stacks and not self.has_exited(rank)]
        for pid in running:
            assert pid is not None
            os.kill(pid, _DUMP_SIGNAL)
        if running:
            time.sleep(_DUMP_S)
        texts = []
        for rank, before in printed.items():
            text = self._printed(rank)[max(len(before) - _TAIL_BYTES, 0) :].decode(errors="replace").strip()
            if text:
                texts.append(f"\n--- output of rank {rank}:\n{text}")
        return "".join(texts)

    def forget_output(self) -> None:
        """Forget what ranks have printed so far."""
        for rank in range(len(self._processes)):
            with contextlib.suppress(FileNotFoundError):  # one that has only just started
                os.truncate(self._output(rank), 0)

    def end(self) -> None:
        """Leave nothing behind. Harmless when all has ended."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _output(self, rank: int) -> Path:
        return self.directory / f"output-{rank}"

    def _printed(self, rank: int) -> bytes:
        try:
            return self._output(rank).read_bytes()
        except FileNotFoundError:  # it has not started yet
            return b""


def _next_message(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):  # OSError: in the middle of a message
        return None


def _rank_main(main: Callable[..., None], pipe: Connection, output: Path, arguments: tuple[Any, ...]) -> None:
    _end_with_parent()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # New ones, which nobody has replaced, and which lose nothing if the rank is killed.
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", write_through=True) for fd in (1, 2)
    )
    faulthandler.enable()
    faulthandler.register(_DUMP_SIGNAL, all_threads=True)
    main(pipe, *arguments)


def _end_with_parent() -> None:
    """A rank must not occupy a device once the process that started it has been killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
