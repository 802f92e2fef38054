"""Runs training scripts as torchrun does, one process per rank, in interpreters that end as a user's does: with their
excepthook, atexit handlers, threads and destructors.

The harness' own ranks leave through `multiprocessing`, and a new interpreter takes seconds to import torch. A server
imports it once and forks; the child runs the script as `__main__` and then ends by itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """How one rank's script has ended."""

    exitcode: int | None
    """Its exit code, minus the signal that ended it, or None if it still ran."""
    seconds: float
    output: str
    """What it wrote to stdout and stderr."""


class ScriptServer:
    """Starts scripts. Close it in the end."""

    def __init__(self) -> None:
        # -X faulthandler: the stacks of a script that crashes; SIGUSR1 has those of one that hangs written.
        self._server = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def run(
        self, source: str, directory: Path, world_size: int, timeout_s: float = 40.0, **variables: str
    ) -> list[Ended]:
        """Run `source` on every rank, in `directory`, with RANK, WORLD_SIZE and `variables` in its environment."""
        assert self._server.stdin is not None and self._server.stdout is not None
        script = directory / "script.py"
        script.write_text(source)
        environment = {"WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo", **variables}
        job = {"script": str(script), "environment": environment, "timeout_s": timeout_s}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        ends = json.loads(self._server.stdout.readline())
        return [
            Ended(exitcode, seconds, (directory / f"output{rank}").read_text())
            for rank, (exitcode, seconds) in enumerate(ends)
        ]

    def close(self) -> None:
        """Let the server end."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(20)


def _serve() -> Mapping[str, Any] | None:
    """Fork ranks for one job after the other. Returns only in a rank, with its job; and None in the end."""
    for line in sys.stdin:
        job = json.loads(line)
        ranks: dict[int, int] = {}
        started_s = time.monotonic()
        for rank in range(int(job["environment"]["WORLD_SIZE"])):
            pid = os.fork()
            if pid == 0:
                return {**job, "rank": rank}
            ranks[pid] = rank
        ends: dict[int, tuple[int | None, float]] = {}
        running = dict(ranks)
        while running and (now_s := time.monotonic() - started_s) < job["timeout_s"]:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                ends[running.pop(pid)] = os.waitstatus_to_exitcode(status), now_s
            else:
                time.sleep(0.01)
        for pid, rank in running.items():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ends[rank] = None, job["timeout_s"]
        print(json.dumps([ends[rank] for rank in sorted(ends)]), flush=True)
    return None


def _become(job: Mapping[str, Any]) -> str:
    """Be a rank of this job. Returns the source of its script."""
    script = Path(job["script"])
    os.chdir(script.parent)
    os.environ.update(job["environment"], RANK=str(job["rank"]))
    output = os.open(f"output{job['rank']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(0)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    return script.read_text()


if __name__ == "__main__":
    import faulthandler
    import gc

    import torch
    import torch._dynamo  # DDP and every optimizer import it on first use

    import ddp_crossover.comm_hook  # noqa: F401

    # Ranks that end need not look through all of torch for garbage: they would copy its memory for that.
    gc.freeze()
    if (_job := _serve()) is not None:
        # At the top level, so that the script's end is that of the interpreter.
        exec(compile(_become(_job), "script.py", "exec"), {"__name__": "__main__"})
