"""Another job on one core: `python neighbour.py DIRECTORY RESOURCE`, started by `soak.py`. Needs no torch.

Takes turns with whoever else holds the lease, until it is told to stop, and then says how many it had.
"""

import json
import select
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "ddp_crossover" / "addons"))

from lease.client import GpuLease

HOLD_S = 0.001
PAUSE_S = 0.02
CONNECT_S = 10.0


def main() -> None:
    """Hold the lease and pause by turns; the hold sleeps, as a host does while its GPU computes."""
    directory, resource = sys.argv[1:]
    lease = GpuLease(resource, job="neighbour", directory=directory, spawn_broker=False)
    assert lease.wait_until_connected(CONNECT_S)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        with lease.held():
            time.sleep(HOLD_S)
    stats = lease.stats()
    lease.close()
    print(json.dumps({"turns": stats.grants, "unleased": dict(stats.unleased), "waited_s": stats.waited_s}), flush=True)


if __name__ == "__main__":
    main()
