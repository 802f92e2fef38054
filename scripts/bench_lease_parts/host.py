"""A host's side: `python -m bench_lease_parts.host DIRECTORY`, once per host, with torchrun's environment.

Starts a rank of each job, as torchrun would have done, and is the device that they share. Ends when all have ended,
with the exit code of the first one that failed.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

from bench_lease_parts.cases import CaseSettings
from bench_lease_parts.device import DEVICE_VARIABLE, serve_device
from ddp_crossover.addons.lease.directory import DIRECTORY_VARIABLE


def main(directory: Path) -> int:
    """Run one host."""
    processes, device_ends = [], []
    for index in range(len(CaseSettings.read(directory).jobs)):
        device_end, job_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {
            "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + index),
            # All hosts of the lab have one file system, and a broker each.
            DIRECTORY_VARIABLE: str(directory / f"lease-{os.environ['RANK']}"),
            DEVICE_VARIABLE: str(job_end.fileno()),
        }
        command = [sys.executable, "-m", "bench_lease_parts.job", str(directory), str(index)]
        processes.append(subprocess.Popen(command, env=os.environ | own, pass_fds=[job_end.fileno()]))
        job_end.close()
        device_ends.append(device_end)
    serve_device(device_ends)
    codes = [process.wait() for process in processes]
    return next((abs(code) for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
