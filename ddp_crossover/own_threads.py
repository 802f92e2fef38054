"""Threads that run legs, and therefore must never wait for one.

The garbage collector may run users' finalizers (``__del__``) in any thread. A finalizer that reads a parameter or
gradient which is on the wire would block the thread that has to complete the leg.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_idents: set[int] = set()


def start_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run ``work`` in such a thread: a daemon, because a leg that waits for a dead peer must not block process exit."""

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
    """Forget all threads. Called in a forked child, which has none of them."""
    _idents.clear()


def is_own(ident: int) -> bool:
    """Whether the thread that Python gives this number is one of these."""
    return ident in _idents


def is_own_thread() -> bool:
    """Whether the caller runs in one of these threads."""
    return is_own(threading.get_ident())


def refuse_to_wait() -> None:
    """Raise if the caller runs in one of these threads.

    Raises:
        RuntimeError: in such a thread. If it comes from a finalizer, Python reports it and goes on.
    """
    if is_own_thread():
        raise RuntimeError(
            "a finalizer (__del__), which the garbage collector runs in a thread of ddp_crossover, uses a parameter or "
            "gradient that may be on the wire, and this thread must not wait for it: do not use parameters or "
            "gradients in __del__"
        )
