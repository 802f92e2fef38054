"""Starts several ranks on one host: `python -m bench_kit.host_ranks N ARGUMENTS`, with torchrun's environment of one.

The host's RANK and WORLD_SIZE count hosts. Its ranks get their own, and GROUP_RANK says on which host they are.
"""

import os
import signal
import subprocess
import sys
import time

POLL_S = 0.05


def main(count: int, arguments: list[str]) -> int:
    """Run `python ARGUMENTS` on each rank; the first one that fails ends the others. Returns its exit status."""
    host, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for local in range(count):
            own = {
                "RANK": host * count + local,
                "WORLD_SIZE": hosts * count,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": count,
                "GROUP_RANK": host,
            }
            environment = os.environ | {name: str(value) for name, value in own.items()}
            ranks.append(subprocess.Popen([sys.executable, *arguments], env=environment))
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.terminate()
                rank.wait()
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
