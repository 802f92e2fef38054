"""How long the lease's own steps take: hand-offs, free turns, looks, and what follows a dead or stopped holder.

    python scripts/bench_handoff.py
    python scripts/bench_handoff.py --rounds 10 --keep-awake --json handoff.json

Brokers and clients are real processes, started afresh in every round. The measurements take turns, round by round, so
that a slow moment of the machine hits them all. A hand-off lasts from the call of the holder's `release` to the return
of the waiting client's `acquire`, by the clock that all processes of a host share. The bare relay shows how much is the
machine's: three processes that pass a message on in the same way and do nothing else. On a virtual machine most of it
is waking a core that sleeps; with `--keep-awake` none does. Needs no GPU and no torch.
"""

import argparse
import json
import os
import platform
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

# The lease as a package of its own, as its broker has it: a client without torch starts in a tenth of a second.
PACKAGE = Path(__file__).resolve().parent.parent / "ddp_crossover"
sys.path.append(str(PACKAGE))

from lease.client import GpuLease  # noqa: E402
from lease.client.connection import ask_status  # noqa: E402
from lease.client.spawn import spawn_broker  # noqa: E402
from lease.directory import BrokerDirectory  # noqa: E402

CONNECT_S = 10.0
HAND_OFF, RELAY = "hand-off, us", "bare relay, us"
FREE_TURN, CONTENDED = "free acquire + release, us", "a look at contended, us"
AFTER_KILL, AFTER_STOP = "regrant after SIGKILL, ms", "regrant after SIGSTOP, ms"
JAIN, HEAVY = "Jain index of {} jobs", "share of weight 4 beside 1"
TARGETS = {
    HAND_OFF: "<= 40 / <= 120",
    CONTENDED: "<= 2",
    AFTER_KILL: "p99 <= 10",
    AFTER_STOP: "<= 1000",
    **{JAIN.format(n): ">= 0.99" for n in (2, 3, 4)},
    HEAVY: "0.76 .. 0.84",
}


# ---- what a client does: one process


def take_turns(lease: GpuLease, turns: int, hold_s: float, gap_s: float) -> list[tuple[float, float, float]]:
    """Hold and pause by turns; when each hold was asked for, began, and was given up."""
    times = []
    for _ in range(turns):
        asked_s = time.monotonic()
        lease.acquire()
        began_s = time.monotonic()
        time.sleep(hold_s)
        released_s = time.monotonic()
        lease.release()
        times.append((asked_s, began_s, released_s))
        time.sleep(gap_s)
    return times


def free_turns(lease: GpuLease, turns: int) -> dict[str, float]:
    """Microseconds for acquire and release that nobody else wants, and for a look at `contended`."""
    start_s = time.monotonic()
    for _ in range(turns):
        lease.acquire()
        lease.release()
    turn_us = 1e6 * (time.monotonic() - start_s) / turns
    start_s = time.monotonic()
    for _ in range(100 * turns):
        _ = lease.contended
    return {"turn": turn_us, "contended": 1e4 * (time.monotonic() - start_s) / turns}


def hold(lease: GpuLease, workers: int) -> None:
    """Hold for good, with live children as those of a DataLoader."""
    lease.acquire()
    for _ in range(workers):
        if os.fork() == 0:
            os.closerange(0, 3)
            signal.alarm(60)
            signal.pause()


def wait(lease: GpuLease) -> float:
    """When the turn came."""
    assert lease.acquire()
    return time.monotonic()


def share(lease: GpuLease, seconds: float, hold_s: float) -> float:
    """Time held while all others want to hold, too."""
    held_s = 0.0
    lease.acquire()
    start_s = time.monotonic()
    while time.monotonic() - start_s < seconds:
        began_s = time.monotonic()
        time.sleep(hold_s)
        held_s += time.monotonic() - began_s
        lease.yield_turn()
    lease.release()
    return held_s


def be_client(options: str) -> None:
    """Make a lease, and do what each line of stdin says."""
    lease = GpuLease("cpu:0", max_stall_s=5.0, max_wait_s=60.0, **json.loads(options))
    assert lease.wait_until_connected(CONNECT_S)
    what = {action.__name__: action for action in (take_turns, free_turns, hold, wait, share)}
    print("ready", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(what[name](lease, *arguments)), flush=True)
    lease.close()


def be_relay_end(fd: int, turns: int, hold_s: float) -> None:
    """Print when each turn began and ended."""
    times = []
    with socket.socket(fileno=fd) as sock:
        for _ in range(turns):
            sock.recv(64)
            began_s = time.monotonic()
            time.sleep(hold_s)
            times.append((began_s, time.monotonic()))
            sock.send(bytes(24))
    print(json.dumps(times))


class Client:
    """A process that runs :func:`be_client`."""

    def __init__(self, directory: BrokerDirectory, stack: ExitStack, **options: Any) -> None:
        options["directory"] = str(directory.path)
        command = [sys.executable, "-I", "-S", __file__, "--client", json.dumps(options)]
        self.process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True)
        )
        stack.callback(os.killpg, self.process.pid, signal.SIGKILL)  # with its forked children
        assert self.answer_line() == "ready\n"

    def answer_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def start(self, name: str, *arguments: float) -> None:
        assert self.process.stdin is not None
        print(json.dumps([name, *arguments]), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        return json.loads(self.answer_line())

    def call(self, name: str, *arguments: float) -> Any:
        self.start(name, *arguments)
        return self.answer()


def in_parallel(clients: list[Client], name: str, *arguments: float) -> list[Any]:
    """What each of them answers."""
    for client in clients:
        client.start(name, *arguments)
    return [client.answer() for client in clients]


# ---- what is measured: in a place with a broker of its own


def hand_offs_us(directory: BrokerDirectory, stack: ExitStack, args: argparse.Namespace) -> list[float]:
    """Two clients that always want it: each hand-off that a waiter was there for."""
    pair = [Client(directory, stack, job=name) for name in "ab"]
    times = in_parallel(pair, "take_turns", args.turns, 1e-3 * args.hold_ms, 0.2e-3 * args.hold_ms)
    holds = sorted(((*t, who) for who in (0, 1) for t in times[who]), key=lambda hold: hold[1])
    after = [(before, hold) for before, hold in pairwise(holds) if before[3] != hold[3]]
    return [1e6 * (hold[1] - before[2]) for before, hold in after if hold[0] < before[2]]


def relays_us(turns: int, hold_s: float) -> list[float]:
    """Two processes that take turns through a third, with nothing of a lease: from send to receive."""
    with ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        ends = []
        for _, end in pairs:
            command = [sys.executable, "-I", "-S", __file__, "--relay-end", str(end.fileno()), str(turns), str(hold_s)]
            ends.append(subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[end.fileno()]))
            stack.callback(ends[-1].kill)
        epoll = select.epoll()
        towards = {pairs[i][0].fileno(): pairs[1 - i][0] for i in range(2)}
        for fd in towards:
            epoll.register(fd, select.EPOLLIN)
        pairs[0][0].send(bytes(24))
        for _ in range(2 * turns - 1):
            [(fd, _)] = epoll.poll(CONNECT_S)
            towards[fd].send(os.read(fd, 64))
        times = sorted(turn for end in ends for turn in json.loads(end.communicate()[0]))
    return [1e6 * (began_s - sent_s) for (_, sent_s), (began_s, _) in pairwise(times)]


def free_turn_us(directory: BrokerDirectory, stack: ExitStack, args: argparse.Namespace) -> dict[str, float]:
    """One client alone."""
    return Client(directory, stack, job="a").call("free_turns", args.turns)


def regrants_s(directory: BrokerDirectory, stack: ExitStack, number: int, times: int) -> list[float]:
    """From the signal to the holder, which has two forked children, to the waiter's turn."""
    regrants = []
    for attempt in range(times):
        with ExitStack() as both:
            holder, waiter = (Client(directory, both, job=f"{name} {attempt}") for name in ("holder", "waiter"))
            holder.call("hold", 2)
            waiter.start("wait")
            time.sleep(0.03)
            sent_s = time.monotonic()
            holder.process.send_signal(number)
            regrants.append(waiter.answer() - sent_s)
    return regrants


def shares(directory: BrokerDirectory, stack: ExitStack, seconds: float, *weights: float) -> list[float]:
    """The part of the time that jobs of these weights held, all of which always want to."""
    clients = [Client(directory, stack, job=str(i), weight=weight) for i, weight in enumerate(weights)]
    held_s = in_parallel(clients, "share", seconds, 0.002)
    return [held / sum(held_s) for held in held_s]


def jain_index(values: list[float]) -> float:
    """1 where all are equal, 1/n where one has it all."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def with_broker(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What ``measure`` says in a fresh directory, with a broker as the first client would start it."""
    with ExitStack() as stack:
        # TemporaryDirectory has mode 0700 and a path that is short enough for a socket.
        directory = BrokerDirectory(stack.enter_context(tempfile.TemporaryDirectory(prefix="lease-")))
        spawn_broker(directory)
        stack.callback(os.kill, json.loads(ask_status(directory, CONNECT_S))["pid"], signal.SIGKILL)
        return measure(directory, stack, *arguments)


def keep_awake(stack: ExitStack) -> None:
    """A process on each core that runs whenever nothing else does."""
    for core in os.sched_getaffinity(0):
        spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10_000))"
        process = stack.enter_context(subprocess.Popen([sys.executable, "-I", "-S", "-c", spin]))
        stack.callback(process.kill)
        os.sched_setaffinity(process.pid, [core])
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))


def measure_round(args: argparse.Namespace) -> dict[str, list[float]]:
    """Every measurement once: its samples, or its one figure."""
    free = with_broker(free_turn_us, args)
    return {
        HAND_OFF: with_broker(hand_offs_us, args),
        RELAY: relays_us(args.turns, 1e-3 * args.hold_ms),
        FREE_TURN: [free["turn"]],
        CONTENDED: [free["contended"]],
        AFTER_KILL: [1e3 * s for s in with_broker(regrants_s, signal.SIGKILL, args.kills)],
        AFTER_STOP: [1e3 * s for s in with_broker(regrants_s, signal.SIGSTOP, args.stops)],
        **{JAIN.format(n): [jain_index(with_broker(shares, args.share_s, *[1.0] * n))] for n in (2, 3, 4)},
        HEAVY: [with_broker(shares, args.share_s, 1.0, 4.0)[1]],
    }


# ---- the report


def quantile(values: list[float], part: float) -> float:
    """The value that ``part`` of them stay below."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def summary(samples: list[float]) -> dict[str, float]:
    """Of one measurement in one round."""
    return {"samples": len(samples), "p50": statistics.median(samples), "p99": quantile(samples, 0.99)}


def print_results(rounds: list[dict[str, list[float]]]) -> None:
    """One row a measurement: the median over rounds, and the lowest and highest round."""
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
    """Measure round by round, print, and write what `--json` asks for."""
    if sys.argv[1:2] == ["--client"]:
        be_client(sys.argv[2])
        return
    if sys.argv[1:2] == ["--relay-end"]:
        be_relay_end(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=1000, help="of each client, in each round")
    parser.add_argument("--hold-ms", type=float, default=1.0, help="how long a turn is")
    parser.add_argument("--kills", type=int, default=20, help="holders killed in each round")
    parser.add_argument("--stops", type=int, default=3, help="holders stopped in each round")
    parser.add_argument("--share-s", type=float, default=1.0, help="how long jobs compete for their shares")
    parser.add_argument("--keep-awake", action="store_true", help="let no core sleep, with idle-priority processes")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()

    # Here, because the clients run without this directory on their path.
    from bench_record import surroundings

    config = {"kernel": platform.release(), "cores": len(os.sched_getaffinity(0))} | surroundings(args)
    print("  ".join(f"{key}={value}" for key, value in config.items()))
    with ExitStack() as stack:
        if args.keep_awake:
            keep_awake(stack)
        rounds = [measure_round(args) for _ in range(args.rounds)]
    print_results(rounds)
    if args.json:
        figures = {name: [summary(samples[name]) for samples in rounds] for name in rounds[0]}
        args.json.write_text(json.dumps({"configuration": config, "rounds": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
