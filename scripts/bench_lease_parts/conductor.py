"""Tells the jobs when to run: every arm in each round, all jobs of an arm in the same window.

    begin - all jobs of the arm train for `settle_s` - window of `window_s`, in which all of them train - end

A job is told its window beforehand and trains until after the end, so no job ever has the hosts to itself in a window.
The conductor is a thread of the bench's process; network namespaces do not matter to Unix sockets with a path.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

from bench_kit.launch import OnProgress, RunRanks, rank_environment
from bench_kit.rounds import turns
from bench_lease_parts.cases import CaseSettings
from bench_lease_parts.figures import steps_between

CONDUCTOR_SOCKET = "conductor.sock"
BEGIN_AHEAD_S = 0.1


class Window(NamedTuple):
    """When a job runs, in seconds of the clock that all processes of this machine share."""

    number: int
    begin_s: float
    end_s: float


class Arm(NamedTuple):
    """Which jobs train in a window, and which of their networks: `plain` or, with the lease, `leased`."""

    name: str
    jobs: tuple[int, ...]
    network: str


def arms_of(settings: CaseSettings) -> list[Arm]:
    """Each job alone, the first one also with its lease, and all at once without and with a lease."""
    every = tuple(range(len(settings.jobs)))
    solos = [Arm(f"solo {settings.jobs[job].name}", (job,), "plain") for job in every]
    return [*solos, Arm("solo leased", (0,), "leased"), Arm("co-run", every, "plain"), Arm("lease", every, "leased")]


def run_case(settings: CaseSettings, hosts: int, run_ranks: RunRanks, on_progress: OnProgress) -> dict[str, Any]:
    """Measure one case on so many hosts; returns what `Conductor.conduct` returns.

    Raises:
        CaseFailed: when a job did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="bench-lease-") as name, ThreadPoolExecutor(1) as pool:
        directory = Path(name)
        settings.write(directory)
        with Listener(str(directory / CONDUCTOR_SOCKET), family="AF_UNIX") as listener:
            conducted = pool.submit(lambda: Conductor(settings, hosts, listener, on_progress).conduct())
            try:
                run_ranks(["-m", "bench_lease_parts.host", name], rank_environment(), lambda line: None)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    Client(listener.address, family="AF_UNIX").close()  # or the conductor would wait for ranks for ever
                # Ranks that ended took the conductor with them, unless it was the other way round.
                its_own = conducted.exception()
                if its_own is not None and not isinstance(its_own, EOFError | ConnectionError):
                    raise its_own from error
                raise
            return conducted.result()


class Conductor:
    """Conducts one case; see the top of this file."""

    def __init__(self, settings: CaseSettings, hosts: int, listener: Listener, on_progress: OnProgress) -> None:
        self._settings, self._hosts, self._listener, self._progress = settings, hosts, listener, on_progress
        self._ranks: dict[tuple[int, int], Connection] = {}
        self._windows = 0

    def conduct(self) -> dict[str, Any]:
        """Measure the case; returns all figures. Raises EOFError or ConnectionError when a rank has ended too early."""
        jobs = range(len(self._settings.jobs))
        with contextlib.ExitStack() as stack:
            while len(self._ranks) < len(jobs) * self._hosts:
                rank = stack.enter_context(self._listener.accept())
                self._ranks[rank.recv()] = rank
            bytes_per_s = min(self._ask([0], "calibrate")[0])
            prepared = []
            for job, settings in enumerate(self._settings.jobs):
                self._progress(f"warming up {settings.name}", 0.0)
                prepared.append(self._ask([job], "prepare", round(settings.link_s * bytes_per_s / 4))[job][0])
            rounds = self._rounds()
            self._ask(jobs, "close")
        return {"jobs": prepared, "rounds": rounds}

    def _rounds(self) -> list[dict[str, Any]]:
        settings = self._settings
        arms = arms_of(settings)
        self._progress("rehearsing", 0.0)
        step_s = max(job.compute_s + job.link_s for job in settings.jobs) * len(settings.jobs)
        # The leased network learns here how long its waits are, and whether the lease pays.
        self._window(arms[-1], max(settings.window_s, settings.rehearsed_steps * step_s))
        rounds: list[dict[str, Any]] = [{} for _ in range(self._settings.rounds)]
        for turn in turns(len(arms), len(rounds)):
            arm = arms[turn.index]
            self._progress(f"round {turn.round + 1} of {len(rounds)}: {arm.name}", turn.behind)
            rounds[turn.round][arm.name] = self._window(arm, settings.window_s)
        return rounds

    def _window(self, arm: Arm, window_s: float) -> dict[int, dict[str, Any]]:
        """For each job of the arm: its steps in the window on each host, how long it ran, and turns of its lease."""
        settings = self._settings
        self._windows += 1
        begin_s = time.monotonic() + BEGIN_AHEAD_S
        start_s = begin_s + settings.settle_s
        end_s = start_s + window_s

        def command(job: int, host: int) -> tuple[Any, ...]:
            return "run", arm.network, Window(self._windows, begin_s + settings.start_delay_s(job, host), end_s)

        return {
            job: {
                "steps": [steps_between(rank["ends_s"], start_s, end_s) for rank in ranks],
                "run_s": max(rank["ends_s"][-1] for rank in ranks) - begin_s,
                **{key: sum(rank[key] for rank in ranks) for key in ("grants", "unleased")},
            }
            for job, ranks in self._exchange(arm.jobs, command).items()
        }

    def _ask(self, jobs: Sequence[int], *command: Any) -> dict[int, list[Any]]:
        return self._exchange(jobs, lambda job, host: command)

    def _exchange(self, jobs: Sequence[int], command: Callable[[int, int], tuple[Any, ...]]) -> dict[int, list[Any]]:
        """Tell all ranks of these jobs what to do; their answers by job, in the order of hosts."""
        places = [(job, host) for job in jobs for host in range(self._hosts)]
        for place in places:
            self._ranks[place].send(command(*place))
        answers = {place: self._ranks[place].recv() for place in places}
        return {job: [answers[job, host] for host in range(self._hosts)] for job in jobs}
