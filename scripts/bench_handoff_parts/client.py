"""A client of the lease in a process of its own: `python client.py OPTIONS`, started by `bench_handoff.py`.

Makes a lease with these options, and then does what each line of stdin says.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "ddp_crossover"))

from lease.client import GpuLease

CONNECT_S = 10.0


def take_turns(lease: GpuLease, turns: int, hold_s: float, gap_s: float) -> list[tuple[float, float, float]]:
    """Hold and pause by turns; returns for each hold when it was asked for, when it began and when it was released."""
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
    """Microseconds of acquire and release without another client, and of reading `contended`."""
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
    """Hold from now on, with live children such as those of a DataLoader."""
    lease.acquire()
    for _ in range(workers):
        if os.fork() == 0:
            os.closerange(0, 3)
            signal.alarm(60)
            signal.pause()


def wait(lease: GpuLease) -> float:
    """Wait for the turn; returns when it came."""
    assert lease.acquire()
    return time.monotonic()


def share(lease: GpuLease, seconds: float, hold_s: float) -> float:
    """Hold and yield by turns; returns the time held. The other clients do the same."""
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


def main() -> None:
    """Make the lease and obey."""
    lease = GpuLease("cpu:0", max_stall_s=5.0, max_wait_s=60.0, **json.loads(sys.argv[1]))
    assert lease.wait_until_connected(CONNECT_S)
    what = {action.__name__: action for action in (take_turns, free_turns, hold, wait, share)}
    print("ready", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(what[name](lease, *arguments)), flush=True)
    lease.close()


if __name__ == "__main__":
    main()
