"""Two jobs on two hosts: do they take turns in the same order on both, and how soon?

    python scripts/bench_two_hosts.py
    python scripts/bench_two_hosts.py --steps 200 --rounds 5 --json two_hosts.json

Each "host" is a directory with a broker of its own; the brokers know nothing of each other. Each job has one rank on
each host. A step takes its turn to compute (a sleep: the GPU is busy, the host is not), exchanges a message with the
rank on the other host, communicates (a sleep), and begins again. One of the ranks of each job may be late by itself in
every step, as with a slow data loader: job a's on the second host, job b's on the first. That keeps an opposite order
going for ever unless something is done about it. Needs no GPU and no torch.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

# The lease as a package of its own, as its broker has it: a client without torch starts in a tenth of a second.
PACKAGE = Path(__file__).resolve().parent.parent / "ddp_crossover"
sys.path.append(str(PACKAGE))

from lease.client import GpuLease  # noqa: E402
from lease.client.connection import ask_status  # noqa: E402
from lease.client.spawn import spawn_broker  # noqa: E402
from lease.directory import BrokerDirectory  # noqa: E402

HOSTS = (0, 1)
JOBS = "ab"
LIMIT_S = 60.0
# From when all ranks are ready until the first of them begins.
START_S = 0.1


class Case(NamedTuple):
    """Two equal jobs. Seconds of computing and of communicating, and how late a rank is by itself."""

    compute_s: float
    link_s: float
    late_s: float


CASES = (Case(0.02, 0.02, 0.002), Case(0.02, 0.03, 0.002), Case(0.02, 0.01, 0.002), Case(0.1, 0.1, 0.01))


class Outcome(NamedTuple):
    """For each step, who computed first on each host; and steps of both jobs per second."""

    orders: list[tuple[str, ...]]
    steps_per_s: float

    @property
    def same_from(self) -> int:
        """The first step from which on the order is the same on both hosts."""
        differing = [step for step, order in enumerate(self.orders) if len(set(order)) > 1]
        return max(differing, default=-1) + 1


def be_rank(options: str) -> None:
    """One rank: prints when each of its turns began, and when all was done."""
    mine, partner, directory, job, steps, compute_s, link_s, late_s, delay_s = json.loads(options)
    exchange = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    exchange.settimeout(LIMIT_S)
    exchange.bind(mine)
    lease = GpuLease("cpu:0", job=job, directory=directory, max_stall_s=5.0, max_wait_s=LIMIT_S)
    assert lease.wait_until_connected(LIMIT_S)
    began = []
    print("ready", flush=True)
    start_s = float(sys.stdin.readline())
    time.sleep(max(start_s + delay_s - time.monotonic(), 0.0))
    for _ in range(steps):
        time.sleep(late_s)
        lease.acquire()
        began.append(time.monotonic())
        time.sleep(compute_s)
        lease.release()
        exchange.sendto(b"gradients", partner)
        exchange.recv(64)
        time.sleep(link_s)
    print(json.dumps([began, time.monotonic()]))
    lease.close()


def run(case: Case, steps: int, opposite: bool) -> Outcome:
    """Both jobs, from their first step on. ``opposite``: job b is first to ask on the second host."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lease-")))
        for host in HOSTS:
            directory = BrokerDirectory(root / str(host))
            spawn_broker(directory)
            stack.callback(os.kill, json.loads(ask_status(directory, LIMIT_S))["pid"], signal.SIGKILL)
        ranks = {}
        for job in JOBS:
            for host in HOSTS:
                leads = (job == JOBS[0]) == (host == 0 or not opposite)
                late_s = case.late_s if (job == JOBS[0]) == (host == 1) else 0.0
                ends = [str(root / f"{job}{which}") for which in (host, 1 - host)]
                delay_s = 0.0 if leads else 0.5 * case.compute_s + case.late_s
                arguments = [*ends, str(root / str(host)), job, steps, case.compute_s, case.link_s, late_s, delay_s]
                command = [sys.executable, "-I", "-S", __file__, "--rank", json.dumps(arguments)]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                process = stack.enter_context(subprocess.Popen(command, **pipes))
                stack.callback(process.kill)
                ranks[job, host] = process
        for process in ranks.values():
            process.stdout.readline()  # ready: how long that takes depends on what else the machine does
        start_s = time.monotonic() + START_S
        for process in ranks.values():
            process.stdin.write(f"{start_s}\n")
            process.stdin.flush()
        answers = {which: json.loads(process.communicate(timeout=LIMIT_S)[0]) for which, process in ranks.items()}
    orders = [
        tuple("".join(sorted(JOBS, key=lambda job: answers[job, host][0][step])) for host in HOSTS)
        for step in range(steps)
    ]
    seconds = max(ended_s for _, ended_s in answers.values()) - start_s
    return Outcome(orders, len(JOBS) * steps / seconds)


def main() -> None:
    """Measure each case in the same and in opposite order by turns, print, and write what `--json` asks for."""
    if sys.argv[1:2] == ["--rank"]:
        be_rank(sys.argv[2])
        return
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()

    config: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release()}
    config |= {"cores": len(os.sched_getaffinity(0)), "steps": args.steps, "rounds": args.rounds}
    print("  ".join(f"{key}={value}" for key, value in config.items()))
    print("compute, link, late ms    steps/s: same order from the start, opposite    ratio    same from step")
    results = []
    for case in CASES:
        pairs = [(run(case, args.steps, False), run(case, args.steps, True)) for _ in range(args.rounds)]
        same, opposite = (statistics.median(pair[i].steps_per_s for pair in pairs) for i in (0, 1))
        ratios = [pair[1].steps_per_s / pair[0].steps_per_s for pair in pairs]
        same_from = [pair[1].same_from for pair in pairs]
        times = ", ".join(f"{1e3 * seconds:g}" for seconds in case)
        print(
            f"{times:24}  {same:10.1f} {opposite:10.1f}  {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} .. {max(ratios):.3f})    {same_from}"
        )
        results.append({**case._asdict(), "pairs": [[outcome._asdict() for outcome in pair] for pair in pairs]})
    if args.json:
        args.json.write_text(json.dumps({"configuration": config, "cases": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
