"""Keeps a turn until the device has done what was queued in it, while the host goes on.

To drain before a release instead would keep the lease while the stream stands at a leg whose peer needs its own turn.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from .turn import Turn

if TYPE_CHECKING:
    from ddp_crossover.device import Stream

# How often a thread looks at the device: while another job waits, its next turn is late by half of this; else the look
# costs about 10 us of an idle core.
POLL_S = 1e-4
_IDLE_POLL_S = 1e-3
# The thread ends when nothing was queued for this long.
_THREAD_LIVES_S = 1.0


class Draining:
    """Ends a turn when the device has drained.

    Kernels that are still queued when a turn ends would run beside those of the next holder. The host does not wait
    for them: it is often a step ahead of the device, and its next turn may begin before they are done.

    Args:
        lock: held while the turn ends, and by the callers of all methods except :meth:`wait`.
        turn: the turn.

    Attributes:
        ended_s: time, as of ``time.perf_counter()``, at which a turn was last ended here; before, ``-inf``.
    """

    def __init__(self, lock: threading.RLock, turn: Turn) -> None:
        self.ended_s = -math.inf
        self._changed = threading.Condition(lock)
        self._turn = turn
        self._is_drained: Callable[[], bool] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a turn is still to be ended."""
        return self._is_drained is not None

    def end_turn(self) -> None:
        # In this order: who sees that nothing is under way must also see that the turn has ended.
        self._turn.end()
        self.ended_s = time.perf_counter()
        self._is_drained = None

    def begin(self, is_drained: Callable[[], bool]) -> None:
        """End the turn as soon as ``is_drained()``, which a thread asks."""
        before = self._is_drained
        # Two models may share a lease: the turn lasts until both have drained.
        self._is_drained = is_drained if before is None else lambda: before() and is_drained()
        if self._thread is None or not self._thread.is_alive():
            serve = _while_alive(weakref.WeakMethod(self._serve))
            thread = threading.Thread(target=serve, name="ddp_crossover-lease-drain", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down
                self.end_turn()
                return
            self._thread = thread
        else:
            self._changed.notify()

    def cancel(self) -> None:
        """Let the turn go on, unless the broker has ended it."""
        if self.is_under_way and not self._turn.is_held:
            self.ended_s = time.perf_counter()
        self._is_drained = None

    def wait(self, limit_s: float) -> bool:
        """Wait until the turn has ended, by this process or by the broker; returns False after ``limit_s``."""
        ends_s = time.perf_counter() + limit_s
        while self.is_under_way and self._turn.is_held:
            if time.perf_counter() > ends_s:
                return False
            time.sleep(POLL_S)
        return True

    def forget_in_child(self) -> None:
        self._thread = self._is_drained = None

    def _serve(self) -> bool:
        """Look once, or sleep until there is something to look at; returns whether to go on."""
        is_drained = self._is_drained
        if is_drained is None:
            with self._changed:
                if self._is_drained is None:
                    self._changed.wait(_THREAD_LIVES_S)
                if self._is_drained is None:
                    self._thread = None
                    return False
        elif not is_drained():
            time.sleep(POLL_S if self._turn.is_contended else _IDLE_POLL_S)
        else:
            with self._changed:
                if self._is_drained is is_drained:  # else the turn has gone on, or was queued for
                    self.end_turn()
        return True


def _while_alive(method: weakref.WeakMethod[Callable[[], bool]]) -> Callable[[], None]:
    """Calls a method until it returns False or its object is gone, which a running thread must not keep alive."""

    def serve() -> None:
        while (bound := method()) is not None and bound():
            del bound

    return serve


def queued_work(stream: Stream | None) -> Callable[[], bool] | None:
    """A function that tells whether the device has done all that is queued on ``stream`` now.

    None if that is certain: in a process that has not used the GPU. An error of an earlier kernel is not raised, and
    ends the work: CUDA raises it again in the job's own next call.

    Args:
        stream: None for the calling thread's current stream.
    """
    # A process that has not imported torch cannot have queued work.
    if "torch" not in sys.modules:
        return None
    from ddp_crossover import device as gpu  # import here: it loads torch

    if not gpu.is_in_use():
        return None
    try:
        event = gpu.record(stream if stream is not None else gpu.current_stream())
    except RuntimeError:
        return None
    return lambda: gpu.has_happened(event, if_broken=True)
