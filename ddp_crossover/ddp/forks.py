"""Finishes pending work before a fork, because the child has none of the threads that could complete it."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Protocol

from ddp_crossover.own_threads import forget_threads


class Forked(Protocol):
    """Interface of objects that are notified of forks, such as a ``DearState``."""

    def before_fork(self) -> None: ...

    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None: ...


_watched: weakref.WeakSet[Forked] = weakref.WeakSet()
_forking: list[Forked] = []
_is_registered = False


def watch_forks(one: Forked) -> None:
    """Call the methods of ``one`` at each ``os.fork()`` of this process, as long as ``one`` lives."""
    global _is_registered
    if not _is_registered:  # Python cannot unregister these functions
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
    # What is garbage now, such as the process group of a model that was attached earlier, would wait in its destructor
    # for threads that the child does not have. Nothing that the parent has made is collected from now on.
    gc.freeze()
    forget_threads()
    _watched.clear()
    while _forking:
        _forking.pop().after_fork_in_child()
