"""Process groups that are made by their members alone, and leave nothing in torch's globals that other ranks lack."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_crossover.torch_internals.private import private

# How many groups were made of the same ranks, per default process group. Their members agree on it, because all of them
# make the same groups in the same order; a process that has begun anew has a new default group, as its peers do.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def new_group(ranks: Sequence[int], *, backend: str, timeout: timedelta, purpose: str) -> dist.ProcessGroup:
    """Make a process group. All of its members must call this, and no other rank needs to.

    Torch names groups by a count of the groups that this process has made. Groups that other ranks know nothing of must
    not be counted: the next ``dist.new_group()`` of the script would have different names on different ranks, and
    would not return. So these groups have names of their own.

    Torch splits new communicators off the default one if ``init_process_group(device_id=)`` has bound that to a device,
    and a split takes all of its ranks. So a group of some of them is made while the default group is not bound.

    Args:
        ranks: global ranks of the members.
        backend: its backend.
        timeout: its time-out.
        purpose: its description in torch's logs.
    """
    default: Any = private(distributed_c10d, "_get_default_group")()
    has_all_ranks = len(ranks) == dist.get_world_size()
    made = _made.setdefault(default, Counter())
    made[tuple(ranks)] += 1
    name = f"ddp_crossover {'_'.join(map(str, ranks))} {made[tuple(ranks)]}"
    name_of_torch, bound_to = private(distributed_c10d, "_process_group_name"), private(default, "bound_device_id")
    setattr(distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name)  # noqa: B010
    if not has_all_ranks:
        default.bound_device_id = None
    try:
        group = dist.new_group(
            ranks=list(ranks),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=not has_all_ranks,
            group_desc=f"ddp_crossover {purpose}",
            device_id=bound_to,
        )
    finally:
        default.bound_device_id = bound_to
        setattr(distributed_c10d, "_process_group_name", name_of_torch)  # noqa: B010
    return cast(dist.ProcessGroup, group)  # never NON_GROUP_MEMBER: only members call this
