"""Process groups that are made by their members alone, and leave nothing in torch's globals that other ranks lack.

To destroy a group is a collective on NCCL. So a rank that is done with one by itself, because its garbage collector
has found a model or the program ends, only gives it up; it is destroyed at a place that all members come to.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_crossover.torch_internals.private import private, replaced


class _Groups:
    """The groups that this process has made beside one default group, by name.

    Attributes:
        made: how many were made of the same ranks. Their members agree on it, because all of them make the same groups
            in the same order; a process that has begun anew has a new default group, as its peers do.
        alive: those that were not destroyed.
        given_up: functions that wait until nobody on this rank uses the group, if there is something to wait for, and
            the group.
    """

    def __init__(self) -> None:
        self.made: Counter[tuple[int, ...]] = Counter()
        self.alive: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()
        self.given_up: dict[str, tuple[Callable[[], None] | None, dist.ProcessGroup]] = {}


_groups_of: weakref.WeakKeyDictionary[dist.ProcessGroup, _Groups] = weakref.WeakKeyDictionary()


def _groups() -> _Groups:
    return _groups_of.setdefault(_default_group(), _Groups())


def _default_group() -> Any:
    return private(distributed_c10d, "_get_default_group")()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that runs what ``group`` does with tensors on ``device``. Raises RuntimeError if it has none."""
    # Newer versions of torch have a public name for it.
    return (getattr(group, "get_backend", None) or private(group, "_get_backend"))(device)


def new_group(
    ranks: Sequence[int], *, backend: str, timeout: timedelta, purpose: str, options: Any = None
) -> dist.ProcessGroup:
    """Make a process group. All of its members must call this, and no other rank needs to.

    Torch names groups by a count of the groups that this process has made. Groups that other ranks know nothing of must
    not be counted: the next ``dist.new_group()`` of the script would have different names on different ranks, and
    would not return. So these groups have names of their own.

    Torch splits new communicators off the default one if ``init_process_group(device_id=)`` has bound that to a device,
    and a split takes all of its ranks. So a group of some of them is made while the default group is not bound.

    With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch checks in each collective of a group that all ranks have started as
    many before, and counts messages, too. Ours are on their way meanwhile, so these groups are made without that check.

    Args:
        ranks: global ranks of the members.
        backend: its backend.
        timeout: its time-out.
        purpose: its description in torch's logs.
        options: options of the backend, with the same time-out; None: its own.
    """
    default, groups = _default_group(), _groups()
    has_all_ranks = len(ranks) == dist.get_world_size()
    groups.made[tuple(ranks)] += 1
    name = f"ddp_crossover {'_'.join(map(str, ranks))} {groups.made[tuple(ranks)]}"
    bound_to = private(default, "bound_device_id")
    with (
        replaced(distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name),
        replaced(default, "bound_device_id", bound_to if has_all_ranks else None),
        replaced(distributed_c10d, "get_debug_level", lambda: dist.DebugLevel.OFF),
    ):
        group = dist.new_group(
            ranks=list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=not has_all_ranks,
            group_desc=f"ddp_crossover {purpose}",
            device_id=bound_to,
        )
    made = cast(dist.ProcessGroup, group)  # never NON_GROUP_MEMBER: only members call this
    groups.alive[name] = made
    return made


def given_up(ranks: Sequence[int]) -> list[str]:
    """Names of the groups of these ranks that this rank has given up."""
    groups = _groups().given_up
    return sorted(name for name, (_, group) in groups.items() if dist.get_process_group_ranks(group) == list(ranks))


def destroy(names: Iterable[str]) -> None:
    """Destroy groups that were given up, one after the other. A collective on NCCL: all members must call it."""
    for name in names:
        if not dist.is_initialized() or (one := _groups().given_up.pop(name, None)) is None:
            continue  # the user's `destroy_process_group()` has destroyed it
        wait_for_use, group = one
        if wait_for_use is not None:
            wait_for_use()
        _groups().alive.pop(name, None)
        with contextlib.suppress(ValueError):  # the same
            dist.destroy_process_group(group)


_before_shutdown: weakref.WeakKeyDictionary[dist.ProcessGroup, Callable[[], None]] = weakref.WeakKeyDictionary()


def before_shutdown(group: dist.ProcessGroup, function: Callable[[], None]) -> None:
    """Call ``function()`` before ``group`` is destroyed, by us or by ``dist.destroy_process_group()`` in a script.

    It must not refer to the group.
    """
    _notice_shutdowns()
    _before_shutdown[group] = function


@functools.cache
def _notice_shutdowns() -> None:
    shutdown = dist.ProcessGroup.shutdown

    def noticed(group: dist.ProcessGroup) -> None:
        try:
            if (function := _before_shutdown.pop(group, None)) is not None:
                function()
        finally:
            shutdown(group)

    dist.ProcessGroup.shutdown = noticed  # type: ignore[assignment, method-assign]


class OwnedGroups:
    """Groups of :func:`new_group` that end with their owner."""

    def __init__(self) -> None:
        self._in_use: list[dist.ProcessGroup] = []
        self._given_up: list[str] = []

    def add(self, group: dist.ProcessGroup) -> None:
        self._in_use.append(group)

    def give_up(self, wait_for_use: Callable[[], None] | None = None) -> None:
        """Note that this rank is done with the groups, and drop the references to them. At any time, on any rank.

        Args:
            wait_for_use: waits until nothing on this rank uses them any more; it must not refer to their owner.
        """
        groups = _groups() if dist.is_initialized() else None
        for group in self._in_use:
            self._given_up.append(group.group_name)
            if groups is not None and groups.alive.get(group.group_name) is group:  # else it was destroyed already
                groups.given_up[group.group_name] = wait_for_use, group
        self._in_use.clear()

    def destroy(self) -> None:
        """Destroy the groups that were given up. All members must call it."""
        destroy(self._given_up)
        self._given_up.clear()
