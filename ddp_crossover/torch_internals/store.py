"""The store through which the processes of a job have found each other."""

from __future__ import annotations

from typing import cast

from torch._C._distributed_c10d import PrefixStore
from torch._C._distributed_c10d import Store as Store  # dist.Store has no type stub
from torch.distributed import distributed_c10d

from ddp_crossover.torch_internals.private import private


def store_of_job(prefix: str) -> Store:
    """The store of the default process group, in which all keys get this prefix."""
    return PrefixStore(prefix, cast(Store, private(distributed_c10d, "_get_default_store")()))
