"""The measurements of `bench_handoff.py`. Each measurement but the relay has a broker and clients of its own."""

import argparse
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_handoff_parts.relay import relays_us
from bench_kit.lease_processes import BrokerDirectory, Program, start_broker
from bench_kit.rounds import jain_index

CLIENT = Path(__file__).with_name("client.py")
HAND_OFF, RELAY = "hand-off, us", "bare relay, us"
FREE_TURN, CONTENDED = "free acquire + release, us", "a look at contended, us"
AFTER_KILL, AFTER_STOP = "regrant after SIGKILL, ms", "regrant after SIGSTOP, ms"
JAIN, HEAVY = "Jain index of {} jobs", "share of weight 4 beside 1"


class Client(Program):
    """A process that runs `client.py`."""

    def __init__(self, directory: BrokerDirectory, stack: ExitStack, **options: Any) -> None:
        super().__init__(stack, CLIENT, options | {"directory": str(directory.path)})
        self.wait_until_ready()

    def call(self, name: str, *arguments: float) -> Any:
        """Run one of the client's actions and return its answer."""
        self.tell(name, *arguments)
        return self.answer()


def measure_round(args: argparse.Namespace) -> dict[str, list[float]]:
    """Every measurement once: its samples, or its one figure."""
    free = _with_broker(_free_turn_us, args)
    return {
        HAND_OFF: _with_broker(_hand_offs_us, args),
        RELAY: relays_us(args.turns, 1e-3 * args.hold_ms),
        FREE_TURN: [free["turn"]],
        CONTENDED: [free["contended"]],
        AFTER_KILL: [1e3 * s for s in _with_broker(_regrants_s, signal.SIGKILL, args.kills)],
        AFTER_STOP: [1e3 * s for s in _with_broker(_regrants_s, signal.SIGSTOP, args.stops)],
        **{JAIN.format(n): [jain_index(_with_broker(_shares, args.share_s, *[1.0] * n))] for n in (2, 3, 4)},
        HEAVY: [_with_broker(_shares, args.share_s, 1.0, 4.0)[1]],
    }


def _with_broker(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Measure in a new directory, with a broker as the first client would start it."""
    with ExitStack() as stack:
        # mkdtemp makes it 0700, and its path is short enough for a socket.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lease-")))
        return measure(start_broker(directory, stack), stack, *arguments)


def _in_parallel(clients: list[Client], name: str, *arguments: float) -> list[Any]:
    """Run an action on all clients at once; returns their answers."""
    for client in clients:
        client.tell(name, *arguments)
    return [client.answer() for client in clients]


def _hand_offs_us(directory: BrokerDirectory, stack: ExitStack, args: argparse.Namespace) -> list[float]:
    """Two clients that always want the lease: microseconds of each hand-off for which the other one waited."""
    pair = [Client(directory, stack, job=name) for name in "ab"]
    times = _in_parallel(pair, "take_turns", args.turns, 1e-3 * args.hold_ms, 0.2e-3 * args.hold_ms)
    holds = sorted(((*turn, client) for client in (0, 1) for turn in times[client]), key=lambda hold: hold[1])
    after = [(before, hold) for before, hold in pairwise(holds) if before[3] != hold[3]]
    return [1e6 * (hold[1] - before[2]) for before, hold in after if hold[0] < before[2]]


def _free_turn_us(directory: BrokerDirectory, stack: ExitStack, args: argparse.Namespace) -> dict[str, float]:
    """One client alone."""
    return Client(directory, stack, job="a").call("free_turns", args.turns)


def _regrants_s(directory: BrokerDirectory, stack: ExitStack, number: int, times: int) -> list[float]:
    """Seconds from the signal to the holder, which has two forked children, to the waiter's turn."""
    regrants = []
    for attempt in range(times):
        with ExitStack() as both:
            holder, waiter = (Client(directory, both, job=f"{name} {attempt}") for name in ("holder", "waiter"))
            holder.call("hold", 2)
            waiter.tell("wait")
            time.sleep(0.03)
            sent_s = time.monotonic()
            holder.process.send_signal(number)
            regrants.append(waiter.answer() - sent_s)
    return regrants


def _shares(directory: BrokerDirectory, stack: ExitStack, seconds: float, *weights: float) -> list[float]:
    """The part of the time that each job held, where jobs of these weights always want the lease."""
    clients = [Client(directory, stack, job=str(i), weight=weight) for i, weight in enumerate(weights)]
    held_s = _in_parallel(clients, "share", seconds, 0.002)
    return [held / sum(held_s) for held in held_s]
