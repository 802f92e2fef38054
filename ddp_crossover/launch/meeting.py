"""Lets the ranks of a job run a script several times: each time they meet at another port."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_LONGEST_RUN = timedelta(hours=1)  # of a script on some rank, while the others wait for the next run


class Meeting:
    """Tells the ranks where to meet; through the store of whoever started them. Without ``RANK`` there is only one.

    torch's store of a job cannot serve a second run: it would hand out the addresses of the first. Rank 0 may host the
    store, so keep this object for as long as ranks talk.
    """

    def __init__(self) -> None:
        self._runs = 0
        if "RANK" in os.environ:
            self._store, self._rank, self._world_size = next(rendezvous("env://"))
            self._store.set_timeout(_LONGEST_RUN)

    def init_process_group(self, backend: str, timeout: timedelta) -> None:
        """Make the default process group of this process."""
        dist.init_process_group(
            backend, store=self._store, rank=self._rank, world_size=self._world_size, timeout=timeout
        )

    def environment(self) -> dict[str, str]:
        """Return environment variables for the next run of a script; every rank must call it, and waits for rank 0."""
        if "RANK" not in os.environ:
            return {}
        self._runs += 1
        key = f"ddp_crossover/port of run {self._runs}"
        if self._rank == 0:
            with socket.create_server(("", 0)) as server:
                port = str(server.getsockname()[1])
            self._store.set(key, port)
        return {"MASTER_PORT": self._store.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}
