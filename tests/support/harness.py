"""Run test functions on real ranks: one process each, gloo over loopback, hard timeouts, nothing
mocked.

Three ways, by how much the ranks may be trusted to survive:

* `RankPool.run`: the ranks stay alive between calls, each call gets a fresh process group. For the
  hundreds of equivalence cases, where starting processes would cost more than the cases themselves.
* `run_ranks`: fresh processes, which must also *exit* by themselves: a thread left behind fails the
  test.
* `run_faulty_ranks`: the same for tests that kill or stop a rank on purpose; it returns what became
  of each.

In the first two, the first rank that fails ends the others and its traceback becomes the test's.
Ranks are forked from a server that has already imported torch (about 20 ms a rank instead of 4 s).
Functions to run are module-level (they travel by name), their results and arguments by
`torch.save`.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from rank_process import DUMP_SIGNAL, dump, load, rank_main, stacks_file

DEFAULT_TIMEOUT_S = 120.0
# How long ranks may take to leave once they have handed in their result.
EXIT_TIMEOUT_S = 15.0

_FORKSERVER_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    # DDP and every optimizer import it on first use, at 2 s in each rank.
    "torch._dynamo",
    "ddp_crossover.comm_hook",
]


class Outcome(NamedTuple):
    """What became of one rank."""

    rank: int
    result: Any
    """What the function returned, or None."""
    error: str | None
    """The traceback of what it raised."""
    exitcode: int | None
    """0, or minus the signal that ended it. None while a pool's rank lives on."""
    seconds: float
    """From the start of the call until the rank had exited (or answered, in a pool)."""


class RankFailure(AssertionError):
    """A rank raised, died or did not end in time."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    start_method: str = "forkserver",
    have_children: bool = False,
) -> list[Any]:
    """Run `fn(*args)` on `world_size` fresh ranks and return their results in rank order.

    The ranks must exit by themselves. `start_method="spawn"` gives each a complete interpreter of
    its own, which leaves as a user's does (atexit handlers, destructors), at some seconds a rank.
    `have_children` allows them to use `multiprocessing` themselves.
    """
    pool = RankPool(world_size, start_method=start_method, have_children=have_children)
    try:
        results = pool.run(fn, *args, timeout_s=timeout_s)
        pool.leave()
        return results
    finally:
        pool.kill()


def run_faulty_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    group_timeout_s: float,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    stops: frozenset[int] = frozenset(),
) -> list[Outcome]:
    """Run `fn(*args)` on fresh ranks of which some will not survive, and return what became of
    every one.

    The ranks in `stops` are expected to stop themselves (SIGSTOP); they are killed once all others
    have exited. Any other rank that has not exited within `timeout_s` hangs, and that is a failure
    of the test.
    """
    pool = RankPool(world_size, group_timeout_s=group_timeout_s)
    try:
        return pool.outcomes_after_faults(fn, args, timeout_s, stops)
    finally:
        pool.kill()


class RankPool:
    """`world_size` processes that run one function after another. Not reusable after a failure:
    make a new one.
    """

    def __init__(
        self,
        world_size: int,
        *,
        group_timeout_s: float = DEFAULT_TIMEOUT_S,
        start_method: str = "forkserver",
        have_children: bool = False,
    ) -> None:
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(_FORKSERVER_PRELOAD)
        self.world_size = world_size
        self.is_spent = False  # whether a function has left something behind that the next one would notice
        # mkdtemp makes it 0700: whoever can write a rendezvous file can join the group.
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main,
                args=(theirs, rank, world_size, str(self._directory), group_timeout_s),
                name=f"rank {rank} of {world_size}",
                daemon=not have_children,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """`fn(*args)` on every rank; the results in rank order, or `RankFailure` with the first
        traceback.
        """
        self._submit(fn, args)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in results]
            ready = wait([self._pipes[rank] for rank in waiting], deadline - time.monotonic())
            if not ready:
                stacks = self._dump_stacks(waiting)
                self.kill()
                answered = "".join(f"rank {rank} answered: {str(result)[-3000:]}\n" for rank, result in results.items())
                raise RankFailure(f"ranks {waiting} still ran after {timeout_s} s\n{answered}{stacks}")
            for rank in (r for r in waiting if self._pipes[r] in ready):
                answer = self._receive(rank)
                if answer is None:
                    self._processes[rank].join(EXIT_TIMEOUT_S)
                    exitcode = self._processes[rank].exitcode
                    self.kill()
                    raise RankFailure(f"rank {rank} of {self.world_size} died, exit code {exitcode}")
                result, error, is_disturbed = answer
                self.is_spent = self.is_spent or is_disturbed
                if error is not None:
                    self.kill()
                    raise RankFailure(f"rank {rank} of {self.world_size} failed:\n{error}")
                results[rank] = result
        return [results[rank] for rank in range(self.world_size)]

    def outcomes_after_faults(
        self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, stops: frozenset[int]
    ) -> list[Outcome]:
        """See `run_faulty_ranks`."""
        start = time.monotonic()
        self._submit(fn, args, last=True)
        answers: dict[int, tuple[Any, str | None]] = {}
        ended_at: dict[int, float] = {}
        survivors = set(range(self.world_size)) - stops
        while survivors - ended_at.keys():
            if time.monotonic() - start > timeout_s:
                hung = sorted(survivors - ended_at.keys())
                stacks = self._dump_stacks(hung)
                raise RankFailure(f"ranks {hung} still ran after {timeout_s} s\n{stacks}")
            for rank in survivors - ended_at.keys():
                # Read before looking at the exit: a rank that waits for its reader would never
                # leave.
                if rank not in answers and self._pipes[rank].poll():
                    answers[rank] = (self._receive(rank) or (None, None, True))[:2]
                if not self._processes[rank].is_alive():
                    ended_at[rank] = time.monotonic() - start
            time.sleep(0.01)
        self.kill()
        return [
            Outcome(
                rank,
                *answers.get(rank, (None, None)),
                exitcode=self._processes[rank].exitcode,
                seconds=ended_at.get(rank, timeout_s),
            )
            for rank in range(self.world_size)
        ]

    def leave(self) -> None:
        """Tell the ranks to exit by themselves and insist that they do."""
        for pipe in self._pipes:
            pipe.send_bytes(b"")
        for rank, process in enumerate(self._processes):
            process.join(EXIT_TIMEOUT_S)
            if process.is_alive():
                stacks = self._dump_stacks([rank])
                raise RankFailure(f"rank {rank} returned but its process did not exit\n{stacks}")
            if process.exitcode != 0:
                raise RankFailure(f"rank {rank} returned but exited with {process.exitcode}")

    def kill(self) -> None:
        """End whatever is left of the ranks, at once. Harmless when nothing is."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _submit(self, fn: Callable[..., Any], args: tuple[Any, ...], last: bool = False) -> None:
        task = dump((fn, args, last))
        for pipe in self._pipes:
            pipe.send_bytes(task)

    def _receive(self, rank: int) -> tuple[Any, str | None, bool] | None:
        """The rank's result, error, and whether its process is disturbed; or None when it died instead of answering."""
        try:
            return load(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return None

    def _dump_stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, DUMP_SIGNAL)
        time.sleep(0.5)
        stacks = [stacks_file(self._directory, rank) for rank in ranks]
        return "\n".join(
            f"--- stacks of rank {rank}:\n{file.read_text()}"
            for rank, file in zip(ranks, stacks, strict=True)
            if file.exists()
        )
