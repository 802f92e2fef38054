"""An event for which a signal handler may wait."""

from __future__ import annotations

import threading


class Latch:
    """An event that is set once. A signal handler may wait for it even if it interrupted a wait for the same event.

    ``threading.Event`` would deadlock there: the interrupted wait may hold its internal lock.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def set(self) -> None:
        """Set the event and wake all waiters."""
        if not self.is_set:
            self.is_set = True
            self._closed.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it is set, or for ``timeout_s`` seconds (-1: no limit); returns whether it is set."""
        # set() assigns is_set before it releases the lock. Each waiter takes the lock and passes it on; a signal
        # handler that interrupts a waiter in between sees is_set, and does not try to take the lock.
        if not self.is_set and self._closed.acquire(timeout=timeout_s):
            self._closed.release()
        return self.is_set
