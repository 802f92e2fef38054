"""The link over NCCL whose gather legs run on copy engines, and leave the multiprocessors to forward. Not measured.

NCCL moves an all-gather by copies of the device if its communicator has the zero-CTA policy, and the memory was
allocated by NCCL and registered with the communicator in one order on all ranks (NCCL 2.28 to 2.30, ``ce_coll.cc`` and
``taskAppend`` in ``enqueue.cc``). Else it takes kernels, and does not say so. The results are the same.

Only gather legs use that communicator: over registered memory NCCL may add up in another way.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover import device as gpu
from ddp_crossover.comm.agreement import all_gather_json, require_equal
from ddp_crossover.comm.all_reduce import backend_for
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.nccl.nccl_link import NcclLink
from ddp_crossover.torch_internals.groups import backend_of, before_shutdown, new_group

_FIRST_NCCL = (2, 28)
_TURNS_OFF = {"NCCL_CUMEM_ENABLE": "0", "NCCL_WIN_ENABLE": "0", "NCCL_P2P_DISABLE": "1"}


def _zero_cta_policy() -> int:
    return dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined, no-any-return]


def is_asked_for(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the options of ``process_group`` have the zero-CTA policy. On all ranks, or DisagreementError."""
    config = getattr(backend_of(process_group, device).options, "config", None)
    asks = config is not None and getattr(config, "cta_policy", None) == _zero_cta_policy()
    require_equal("process_group", {"zero-CTA policy": asks}, process_group, device)
    return asks


class _Rank(NamedTuple):
    """What one rank knows.

    Attributes:
        lacks: what it lacks by itself, or None.
        host: its host.
        gpu: UUID of its device.
        unreachable: UUIDs of the devices whose memory that cannot access, of those that the rank sees.
    """

    lacks: str | None
    host: str
    gpu: str
    unreachable: Sequence[str]


def refuse_unless_possible(process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse copy engines where torch, NCCL or the devices are known to lack them. All ranks must call it.

    Raises:
        ValueError: on all ranks; it names what is missing, and the way out.
    """
    lacks = _lacks(backend_of(process_group, device))
    mine = _Rank(lacks, socket.gethostname(), gpu.uuid(device), gpu.unreachable_peers(device))
    ranks = [_Rank(*rank) for rank in all_gather_json(mine, process_group, device)]
    if (why := _why_not(ranks)) is not None:
        raise ValueError(
            f"process_group has the zero-CTA policy, which asks for gather legs on copy engines, but {why}: leave out "
            "config.cta_policy, and they run in kernels"
        )


def _lacks(backend: Any, environ: Mapping[str, str] = os.environ) -> str | None:
    if not hasattr(backend, "register_mem_pool"):
        return f"the backend {backend.name()} of torch {torch.__version__} registers no memory (nccl-legacy does)"
    if (version := gpu.nccl_version()) < _FIRST_NCCL:
        return f"NCCL {'.'.join(map(str, version))} has none (2.28 and later have)"
    for name, off in _TURNS_OFF.items():
        if environ.get(name, "").strip() == off:
            return f"{name}={off} in the environment turns off what they need"
    try:
        backend.mem_allocator  # noqa: B018 - torch looks at the device here
    except RuntimeError as error:
        return f"NCCL allocates no memory of its own on this device ({error})"
    return None


def _why_not(ranks: Sequence[_Rank]) -> str | None:
    for number, rank in enumerate(ranks):
        if rank.lacks is not None:
            return f"on rank {number} {rank.lacks}"
    for (one, left), (other, right) in combinations(enumerate(ranks), 2):
        if left.host != right.host:
            return f"ranks {one} and {other} are on different hosts"
        if left.gpu == right.gpu:
            return f"ranks {one} and {other} share a GPU"
        if right.gpu in left.unreachable or left.gpu in right.unreachable:
            return f"the GPUs of ranks {one} and {other} cannot access each other's memory"
    return None


class _RegisteredMemory:
    """Memory of NCCL, and its registration with the communicator of one backend.

    It must be deregistered before the communicator ends: torch would end the process, or raise when memory is freed.
    """

    def __init__(self, backend: Any, device: torch.device) -> None:
        self._backend = backend
        self._pool: gpu.MemoryPool | None = gpu.new_memory_pool(backend.mem_allocator, device)
        self._is_registered = False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert self._pool is not None and not self._is_registered  # else each rank would wait for the others here
        with gpu.in_memory_pool(self._pool, device):
            return torch.empty(numel, dtype=dtype, device=device)

    def register(self) -> None:
        self._backend.register_mem_pool(self._pool, symm=True)
        self._is_registered = True

    def deregister(self) -> None:
        if self._is_registered:
            self._is_registered = False
            self._backend.deregister_mem_pool(self._pool)
        self._pool = None  # so that the memory is freed with the arenas


def _finish(stream: gpu.Stream, memory: _RegisteredMemory) -> None:
    stream.synchronize()
    memory.deregister()


class CopyEngineLink(NcclLink):
    """Gathers from registered memory, on a process group with the zero-CTA policy that the link owns and destroys.

    Arenas of later plans that do not fit in the first ones are not registered, and slices that travel as codes are not
    in arenas: both are gathered by kernels. So are the probe's.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        small_group: dist.ProcessGroup,
        timeout: timedelta,
    ) -> None:
        super().__init__(process_group, device, small_group, timeout)
        options: Any = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = _zero_cta_policy()
        options._timeout = timeout
        self._gather_group = new_group(
            dist.get_process_group_ranks(process_group),
            backend=backend_for(process_group, device),
            timeout=timeout,
            purpose="gather legs",
            options=options,
        )
        self.owned_groups.add(self._gather_group)
        self._registered = _RegisteredMemory(backend_of(self._gather_group, device), device)
        before_shutdown(self._gather_group, functools.partial(_finish, self._stream, self._registered))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._registered.allocate(numel, dtype, device)

    def connect(
        self, arenas: Collection[Tensor], coded: Sequence[FusionBuffer] = (), *, exchanges_numbers: bool = False
    ) -> None:
        # The first collective makes the communicator, with which torch can register memory then.
        with gpu.on_stream(self._stream):
            whole = torch.zeros(self.world_size, device=self._device)
            self._gather(whole, whole[self.rank : self.rank + 1])
        self._stream.synchronize()
        self._registered.register()
        super().connect(arenas, coded, exchanges_numbers=exchanges_numbers)

    def shut_down(self) -> None:
        super().shut_down()
        # At the program's end nobody may destroy the group. Peers have written here if our last leg has ended.
        if gpu.is_idle(self._stream):
            self._registered.deregister()
