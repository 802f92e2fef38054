"""Measure what the lease takes: hand-offs between two jobs, turns on a free resource, and a look at who else wants it.

    python scripts/bench_handoff.py
    python scripts/bench_handoff.py --rounds 10 --json handoff.json

Brokers and clients are real processes, started afresh in every round. A hand-off lasts from the call of the holder's
release to the return of the waiting client's acquire, by the clock that all processes of a host share. The bare relay
shows what the machine takes to pass a message on through a third process, as the broker would: two wake-ups. Jobs that
hand over to each other need one. On a virtual machine most of it is waking a core that sleeps. Needs no GPU and no
torch.
"""

import multiprocessing
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

from bench_kit import record
from bench_kit.lease_processes import GpuLease, start_broker
from bench_kit.options import add_results, make_parser, positive, positive_int
from bench_kit.rank_processes import RankProcesses

HAND_OFF, RELAY = "hand-off, us", "bare relay, us"
FREE_TURN, CONTENDED = "free acquire + release, us", "a look at contended, us"
TARGETS = {HAND_OFF: "<= 60 / <= 150", CONTENDED: "<= 2"}
CONNECT_S = POLL_S = 10.0
LIMIT_S = 600.0  # for the turns of one round
TURN = bytes(24)  # as long as a message of the lease


class Hold(NamedTuple):
    """When a client asked for the lease, got it, and released it."""

    asked_s: float
    began_s: float
    released_s: float


def take_turns(begin: Barrier, directory: str, job: str, turns: int, hold_s: float) -> list[Hold]:
    """Hold and pause by turns, in a process of its own."""
    lease = _connected(directory, job)
    begin.wait()
    holds = []
    for _ in range(turns):
        asked_s = time.monotonic()
        lease.acquire()
        began_s = time.monotonic()
        time.sleep(hold_s)
        holds.append(Hold(asked_s, began_s, time.monotonic()))
        lease.release()
        time.sleep(0.2 * hold_s)
    lease.close()
    return holds


def free_turns_us(begin: Barrier, directory: str, turns: int) -> tuple[float, float]:
    """Microseconds of acquire and release without another client, and of reading `contended`."""
    lease = _connected(directory, "a")
    start_s = time.monotonic()
    for _ in range(turns):
        lease.acquire()
        lease.release()
    turn_us = 1e6 * (time.monotonic() - start_s) / turns
    start_s = time.monotonic()
    for _ in range(100 * turns):
        _ = lease.contended
    look_us = 1e4 * (time.monotonic() - start_s) / turns
    lease.close()
    return turn_us, look_us


def _connected(directory: str, job: str) -> GpuLease:
    lease = GpuLease("cpu:0", job=job, directory=directory, max_stall_s=5.0, max_wait_s=60.0)
    assert lease.wait_until_connected(CONNECT_S)
    return lease


def relay_turns(begin: Barrier, end: socket.socket, turns: int, hold_s: float) -> list[tuple[float, float]]:
    """When each turn of one end of the relay began and ended."""
    begin.wait()
    times = []
    for _ in range(turns):
        end.recv(len(TURN))
        began_s = time.monotonic()
        time.sleep(hold_s)
        times.append((began_s, time.monotonic()))
        end.send(TURN)
    return times


@contextmanager
def processes(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Callable[[], list[Any]]]:
    """Run `work(begin, *arguments)` in a process for each of the arguments; yields what waits for their answers.

    At the barrier `begin` they can wait for each other before anything is timed.
    """
    begin = multiprocessing.get_context("spawn").Barrier(len(arguments))
    started = RankProcesses(_answer, [(work, begin, of_one) for of_one in arguments], start_method="spawn")
    try:
        yield lambda: _answers(started, len(arguments))
    finally:
        started.end()


def _answer(
    pipe: Connection, directory: Path, work: Callable[..., Any], begin: Barrier, arguments: tuple[Any, ...]
) -> None:
    pipe.send(work(begin, *arguments))


def _answers(started: RankProcesses, count: int) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while waiting := [number for number in range(count) if number not in answers]:
        said = started.receive(waiting, deadline_s)
        if not said or None in said.values():
            raise RuntimeError(f"no answer from all of the processes {waiting}{started.output(waiting)}")
        answers |= said
    return [answers[number] for number in range(count)]


@contextmanager
def broker() -> Iterator[str]:
    """The directory of a new broker, as the first client would start it."""
    # mkdtemp makes it 0700, and its path is short enough for a socket.
    with tempfile.TemporaryDirectory(prefix="lease-") as directory, ExitStack() as stack:
        start_broker(Path(directory), stack)
        yield directory


def hand_offs_us(turns: int, hold_s: float) -> list[float]:
    """Two clients that always want the lease: microseconds of each hand-off for which the other one waited."""
    with broker() as directory, processes(take_turns, [(directory, job, turns, hold_s) for job in "ab"]) as answers:
        of_clients = answers()
    holds = sorted(((hold, client) for client in (0, 1) for hold in of_clients[client]), key=lambda hold: hold[0][1])
    after = [(before, hold) for (before, left), (hold, came) in pairwise(holds) if left != came]
    return [1e6 * (hold.began_s - before.released_s) for before, hold in after if hold.asked_s < before.released_s]


def relays_us(turns: int, hold_s: float) -> list[float]:
    """Two processes take turns through a third one, this: microseconds from each send to its receive."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    with processes(relay_turns, [(end, turns, hold_s) for _, end in pairs]) as answers:
        towards = {pairs[i][0].fileno(): (pairs[i][0], pairs[1 - i][0]) for i in (0, 1)}
        epoll = select.epoll()
        for fd in towards:
            epoll.register(fd, select.EPOLLIN)
        pairs[0][0].send(TURN)
        for _ in range(2 * turns - 1):
            [(fd, _)] = epoll.poll(POLL_S)
            source, target = towards[fd]
            target.send(source.recv(len(TURN)))
        times = sorted(turn for of_end in answers() for turn in of_end)
    return [1e6 * (began_s - sent_s) for (_, sent_s), (began_s, _) in pairwise(times)]


def measure_round(turns: int, hold_s: float) -> dict[str, list[float]]:
    """Every measurement once: its samples, or its one figure. By turns, so that a slow moment hits them all."""
    with broker() as directory, processes(free_turns_us, [(directory, turns)]) as answers:
        ((turn_us, look_us),) = answers()
    return {
        HAND_OFF: hand_offs_us(turns, hold_s),
        RELAY: relays_us(turns, hold_s),
        FREE_TURN: [turn_us],
        CONTENDED: [look_us],
    }


def summary(samples: list[float]) -> dict[str, float]:
    """The figures of one measurement in one round."""
    import numpy as np  # here, because clients read this file as well, and need none

    return {"samples": len(samples), "p50": statistics.median(samples), "p99": float(np.quantile(samples, 0.99))}


def print_results(rounds: list[dict[str, list[float]]]) -> None:
    """Print a row for each measurement: the median over rounds, and the lowest and highest round."""
    print(f"{'':28} {'p50':>9} {'(rounds)':>20} {'p99':>9} {'(rounds)':>20}   target")
    for name in rounds[0]:
        row = f"{name:28}"
        for which in ("p50", "p99"):
            figures = [summary(samples[name])[which] for samples in rounds]
            many = len(rounds[0][name]) > 1 or which == "p50"
            spread = f"{min(figures):.4g} .. {max(figures):.4g}"
            row += f" {statistics.median(figures):9.4g} {spread:>20}" if many else f" {'':30}"
        print(f"{row}   {TARGETS.get(name, '')}")


def main() -> None:
    """Measure round by round, print, and write the file that `--json` asks for."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=positive_int, default=5, help="how often everything is measured (%(default)s)")
    add("--turns", type=positive_int, default=1000, help="turns of each client in each round (%(default)s)")
    add("--hold-ms", type=positive, default=1.0, help="length of a turn (%(default)s)")
    add_results(parser)
    args = parser.parse_args()
    config = record.configuration(args)
    record.show_configuration(config)
    rounds = [measure_round(args.turns, 1e-3 * args.hold_ms) for _ in range(args.rounds)]
    print_results(rounds)
    figures = {name: [summary(samples[name]) for samples in rounds] for name in rounds[0]}
    record.write({"configuration": config, "rounds": figures}, args.json)


if __name__ == "__main__":
    main()
