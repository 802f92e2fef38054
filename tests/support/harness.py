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

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from bench_kit.rank_processes import RankProcesses
from rank_process import dump, load, rank_main

DEFAULT_TIMEOUT_S = 120.0


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


def assert_lost_peer_is_named(survivors: list[Outcome], within_s: float) -> None:
    """Each survivor has raised an error whose last line says what it waited for and of whom, and has exited."""
    for outcome in survivors:
        assert outcome.error is not None, f"rank {outcome.rank}: {outcome.result}"
        last_line = outcome.error.strip().splitlines()[-1]
        assert re.search(r"rank \d", last_line), outcome.error
        assert re.search(r"(scatter|gather) leg", last_line), outcome.error
        assert re.search(r"group \d", last_line), outcome.error
        assert outcome.exitcode == 0
        assert outcome.seconds < within_s


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
        self.world_size = world_size
        self.is_spent = False  # whether a function has left something behind that the next one would notice
        arguments = [(rank, world_size, group_timeout_s) for rank in range(world_size)]
        self._ranks = RankProcesses(rank_main, arguments, start_method=start_method, have_children=have_children)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """`fn(*args)` on every rank; the results in rank order, or `RankFailure` with the first
        traceback.
        """
        self._submit(fn, args)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in results]
            answers = self._ranks.receive(waiting, deadline)
            if not answers:
                answered = "".join(f"rank {rank} answered: {str(result)[-3000:]}\n" for rank, result in results.items())
                self._fail(f"ranks {waiting} still ran after {timeout_s} s\n{answered}", waiting)
            for rank, answer in answers.items():
                if answer is None:
                    exitcode = self._ranks.exitcode(rank)
                    self._fail(f"rank {rank} of {self.world_size} died, exit code {exitcode}", [rank])
                result, error, is_disturbed = load(answer)
                self.is_spent = self.is_spent or is_disturbed
                if error is not None:
                    self._fail(f"rank {rank} of {self.world_size} failed:\n{error}", [rank], stacks=False)
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
                self._fail(f"ranks {hung} still ran after {timeout_s} s", hung)
            for rank in survivors - ended_at.keys():
                if self._ranks.has_exited(rank):
                    ended_at[rank] = time.monotonic() - start
            # Read behind that, to have the answer of each that has exited; a rank that waits for its reader never does.
            for rank, answer in self._ranks.receive(survivors - answers.keys(), time.monotonic()).items():
                answers[rank] = (None, None) if answer is None else load(answer)[:2]
            time.sleep(0.01)
        self.kill()
        return [
            Outcome(
                rank,
                *answers.get(rank, (None, None)),
                exitcode=self._ranks.exitcode(rank),
                seconds=ended_at.get(rank, timeout_s),
            )
            for rank in range(self.world_size)
        ]

    def leave(self) -> None:
        """Tell the ranks to exit by themselves and insist that they do."""
        self._ranks.send(b"")
        for rank in range(self.world_size):
            exitcode = self._ranks.exitcode(rank)
            if exitcode is None:
                self._fail(f"rank {rank} returned but its process did not exit", [rank])
            if exitcode != 0:
                self._fail(f"rank {rank} returned but exited with {exitcode}", [rank])

    def kill(self) -> None:
        """End whatever is left of the ranks, at once. Harmless when nothing is."""
        self._ranks.end()

    def _submit(self, fn: Callable[..., Any], args: tuple[Any, ...], last: bool = False) -> None:
        self._ranks.forget_output()
        self._ranks.send(dump((fn, args, last)))

    def _fail(self, what: str, ranks: list[int], *, stacks: bool = True) -> NoReturn:
        """End all ranks; raise with the output of these, and where they hang."""
        output = self._ranks.output(ranks, stacks=stacks)
        self.kill()
        raise RankFailure(f"{what}{output}")
