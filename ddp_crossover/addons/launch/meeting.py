"""Lets the ranks of a job run a script several times: each time they meet at another port."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_LONGEST_RUN = timedelta(hours=1)  # of a script on some rank, while the others wait for the next run


class Meeting:
    """Lets ranks talk, through the store of whoever started them. Without ``RANK`` there is only one.

    torch's store of a job cannot serve a second run: it would hand out the addresses of the first. Rank 0 may host the
    store, so keep this object for as long as ranks talk. Every rank must call its methods, in the same order.

    Attributes:
        rank: this rank.
    """

    def __init__(self) -> None:
        self._is_alone = not os.environ.get("RANK")
        self._calls = 0
        self.rank, self._world_size = 0, 1
        if not self._is_alone:
            self._store, self.rank, self._world_size = next(rendezvous("env://"))
            self._store.set_timeout(_LONGEST_RUN)

    def init_process_group(self, backend: str, timeout: timedelta) -> None:
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self._world_size, timeout=timeout
        )

    def environment(self) -> dict[str, str]:
        """Return environment variables for the next run of a script; waits for rank 0."""
        if self._is_alone:
            return {}
        port = self._of_one("port", self.rank == 0, _free_port)
        return {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}

    def of_this_machine(self, make: Callable[[], str]) -> str:
        """Return what ``make`` returns on the rank of this machine that comes first."""
        if self._is_alone:
            return make()
        is_first = self._store.add(f"ddp_crossover/{self._calls} on {_machine()}", 1) == 1
        return self._of_one(f"value on {_machine()}", is_first, make)

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in order; waits for all of them."""
        if self._is_alone:
            return [value]
        key = self._next_key("value of rank")
        self._store.set(f"{key} {self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{key} {rank}")) for rank in range(self._world_size)]

    def part(self) -> None:
        """Wait for all ranks a last time; rank 0 leaves last, because it may host the store."""
        self.gather(None)
        if self._is_alone:
            return
        key = self._next_key("leaves: rank")
        self._store.set(f"{key} {self.rank}", "")
        if self.rank == 0:
            self._store.wait([f"{key} {rank}" for rank in range(self._world_size)])

    def _of_one(self, what: str, is_mine: bool, make: Callable[[], str]) -> str:
        key = self._next_key(what)
        if is_mine:
            self._store.set(key, make())
        value: bytes = self._store.get(key)
        return value.decode()

    def _next_key(self, what: str) -> str:
        self._calls += 1
        return f"ddp_crossover/{self._calls} {what}"


def _free_port() -> str:
    with socket.create_server(("", 0)) as server:
        return str(server.getsockname()[1])


def _machine() -> str:
    """What ranks have in common that see the same processes and files."""
    namespaces = [Path(f"/proc/self/ns/{what}") for what in ("pid", "mnt")]
    ids = [os.readlink(path) for path in namespaces if path.exists()]
    return " ".join([socket.gethostname(), *ids])
