"""Threads on which legs depend. They must not wait for a leg, whatever they happen to run.

The collector of garbage runs finalizers (``__del__``) of users in any thread. One that looks at a parameter or gradient
that is on the wire would wait for what only this thread can bring about.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_idents: set[int] = set()


def start_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run ``work`` in a thread of this kind, a daemon: a job that hangs on a dead peer must not keep the process."""

    def run() -> None:
        _idents.add(threading.get_ident())
        try:
            work()
        finally:
            _idents.discard(threading.get_ident())

    thread = threading.Thread(target=run, name=f"ddp_crossover-{name}", daemon=True)
    thread.start()
    return thread


def forget_threads() -> None:
    """In a forked child, which has none of them."""
    _idents.clear()


def is_own_thread() -> bool:
    """Whether the caller runs in one of them."""
    return threading.get_ident() in _idents


def refuse_to_wait() -> None:
    """Raise in one of them.

    Raises:
        RuntimeError: which Python reports, and ignores, where it comes from a finalizer.
    """
    if is_own_thread():
        raise RuntimeError(
            "a finalizer (__del__), which the collector of garbage runs in a thread of ddp_crossover, uses a parameter "
            "or gradient that may be on the wire: nothing can be waited for there"
        )
