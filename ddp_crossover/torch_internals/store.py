"""The store through which the processes of a job have found each other."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist

from ddp_crossover.torch_internals.private import private


def store_of_job(prefix: str) -> dist.Store:
    """The store of the default process group, in which all keys get this prefix."""
    return dist.PrefixStore(prefix, cast(dist.Store, private(dist.distributed_c10d, "_get_default_store")()))
