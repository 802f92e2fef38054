"""One rank: `python rank.py ARGUMENTS`, started by `bench_two_hosts.py`.

Prints when each of its turns began, and when it had finished.
"""

import json
import socket
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "ddp_crossover"))

from lease.client import GpuLease

LIMIT_S = 60.0


def main() -> None:
    """Run all steps of this rank."""
    mine, partner, directory, job, steps, compute_s, link_s, late_s, delay_s = json.loads(sys.argv[1])
    exchange = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    exchange.settimeout(LIMIT_S)
    exchange.bind(mine)
    lease = GpuLease("cpu:0", job=job, directory=directory, max_stall_s=5.0, max_wait_s=LIMIT_S)
    assert lease.wait_until_connected(LIMIT_S)
    began = []
    print("ready", flush=True)
    start_s = json.loads(sys.stdin.readline())[0]
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


if __name__ == "__main__":
    main()
