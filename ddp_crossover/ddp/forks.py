"""Nothing is pending in a forked child: it has none of the threads that updates and gradients would wait for."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_crossover.comm_hook import DearState


_watched: weakref.WeakSet[DearState] = weakref.WeakSet()
_forking: list[DearState] = []
_is_registered = False


def watch_forks(one: DearState) -> None:
    """Call its methods at each ``os.fork()`` of this process, as long as it lives."""
    global _is_registered
    if not _is_registered:  # there is no way to take it back
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
        _is_registered = True
    _watched.add(one)


def _before() -> None:
    for one in list(_watched):
        _forking.append(one)
        one.before_fork()


def _in_parent() -> None:
    while _forking:
        _forking.pop().after_fork_in_parent()


def _in_child() -> None:
    _watched.clear()
    while _forking:
        _forking.pop().after_fork_in_child()
