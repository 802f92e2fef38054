"""Starts ranks: on the hosts of a lab, or as processes over loopback."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.distributed import TCPStore

from lab import Lab, LabError
from lab_parts.commands import END_GRACE_S, Run
from lab_parts.links import INTERFACE
from lab_parts.signals import ending_signals_raise
from lab_parts.torchrun import worker_variables

ROOT = Path(__file__).resolve().parents[2]
# Long enough for BERT-base at 1 Gb/s with all arms; a case that hangs is ended by the ranks' own timeout.
CASE_TIMEOUT_S = 4 * 3600.0
# A rank prints these lines for the bench, not for the user: one JSON object each.
NEWS_BEGIN = '{"doing"'
# Names the network interface on which only this rank sends, on a host of a lab.
INTERFACE_VARIABLE = "BENCH_INTERFACE"
OnProgress = Callable[[str, float], None]
"""Called with what is done now, and the share of a case that is over."""
RunRanks = Callable[[list[str], dict[str, str], Callable[[str], None]], None]
"""Runs `python ARGUMENTS` once per rank with additional environment variables; calls back with each line of output."""


def tell(doing: str, behind: float) -> None:
    """Print one line of news: what is done now, and the share of a case that is over. Rank 0 does so for all."""
    if int(os.environ["RANK"]) != 0:
        return
    # In one write, with its newline: other ranks write to the same pipe, and python -u would write the newline alone.
    sys.stdout.write(json.dumps({"doing": doing, "behind": behind}) + "\n")
    sys.stdout.flush()


def sent_bytes() -> int | None:
    """What this rank has sent since its host began, with all headers; None where the host is not its own. On a rank."""
    interface = os.environ.get(INTERFACE_VARIABLE)
    for line in Path("/proc/self/net/dev").read_text().splitlines() if interface else ():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])  # after eight counters of what it has received
    return None


def news_to(on_progress: OnProgress) -> Callable[[str], None]:
    """Return what to call with each line that ranks print, to have the news among them passed on."""

    def on_line(line: str) -> None:
        if line.startswith(NEWS_BEGIN):
            news = json.loads(line)
            on_progress(news["doing"], news["behind"])

    return on_line


class CaseFailed(Exception):
    """A rank ended with an error; holds what it printed."""


def rank_environment() -> dict[str, str]:
    """The variables that a rank needs beside torchrun's."""
    paths = [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Ranks are started with -m, which puts the current directory first: that may be another checkout of the package.
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def over_loopback(world_size: int, timeout_s: float = CASE_TIMEOUT_S) -> Iterator[RunRanks]:
    """Ranks as processes of this machine. No network lies between them."""

    def run_ranks(arguments: list[str], environment: dict[str, str], on_line: Callable[[str], None]) -> None:
        # No rank serves the store, so no port has to be guessed.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        master = "127.0.0.1", store.port
        run = Run(lambda rank, stream, line: on_line(line))
        try:
            for rank in range(world_size):
                own = worker_variables(rank, world_size, world_size, master, "loopback", agent_has_store=True)
                run.start(rank, [sys.executable, "-X", "faulthandler", *arguments], os.environ | own | environment)
            if not (ended := run.follow_to_the_end(timeout_s)):
                run.send(signal.SIGABRT)  # they say where they are
                run.follow(END_GRACE_S, until=lambda: run.ended)
        finally:
            run.end()
        if not ended:
            ranks = "".join(f"\nrank {rank.result().how_it_failed()}" for rank in run.hosts)
            raise CaseFailed(f"the ranks had not ended after {timeout_s:g} s{ranks}")
        if run.failed is not None:
            raise CaseFailed(f"rank {run.failed.result().how_it_failed()}")

    with ending_signals_raise():
        yield run_ranks


@contextlib.contextmanager
def on_lab(
    hosts: int,
    rate: str,
    burst: str = "256kb",
    latency: str = "20ms",
    *,
    ranks_per_host: int = 1,
    slow_nic: str | None = None,
    delay_ms: float | None = None,
    per_connection: str | None = None,
    timeout_s: float = CASE_TIMEOUT_S,
) -> Iterator[RunRanks]:
    """Ranks on the hosts of a lab; `rate` may be "none", and `slow_nic` is that of the last host if it differs.
    `delay_ms` is how much later each packet arrives; None: at once. `per_connection` limits each TCP connection.

    Raises LabError where no lab can be built.
    """
    several = [] if ranks_per_host == 1 else ["-m", "bench_kit.host_ranks", str(ranks_per_host)]
    with Lab(
        hosts,
        rate=None if rate == "none" else rate,
        burst=burst,
        latency=latency,
        slow_nic=slow_nic,
        delay_ms=delay_ms,
        per_connection=per_connection,
    ) as lab:

        def run_ranks(arguments: list[str], environment: dict[str, str], on_line: Callable[[str], None]) -> None:
            try:
                lab.run(
                    [sys.executable, *several, *arguments],
                    env=environment | {INTERFACE_VARIABLE: INTERFACE},
                    timeout_s=timeout_s,
                    on_line=lambda rank, stream, line: on_line(line),
                )
            except LabError as error:
                raise CaseFailed(str(error)) from error

        yield run_ranks
