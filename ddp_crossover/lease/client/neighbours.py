"""The clients that this one may wake when it hands its resource over.

Each client has an *alarm*, an eventfd that the broker has made and given to clients of the same user. Waking is adding
the promised fence to it. An eventfd wakes the other process on another core if one is free. A socket would wake it on
this core, on the assumption that this process is about to sleep. A pipe raises SIGPIPE, and a futex takes longer to
call through ``ctypes``. Clients do not spin while they wait: on two cores that took the core of the holder, and one
hand-off in ten took half a millisecond.
"""

from __future__ import annotations

import os

_MOST = 64


class Neighbours:
    """The alarms of other clients, as introduced by the broker."""

    def __init__(self) -> None:
        self._alarms: dict[int, int] = {}

    def add(self, member: int, fd: int) -> None:
        """Take over ``fd``, the alarm of ``member``. Beyond a limit, drops the one that has been known for longest."""
        if (known := self._alarms.pop(member, None)) is not None:
            os.close(known)
        if len(self._alarms) == _MOST:
            os.close(self._alarms.pop(next(iter(self._alarms))))
        self._alarms[member] = fd

    def knows(self, member: int) -> bool:
        return member in self._alarms

    def wake(self, member: int, fence: int) -> bool:
        """Tell ``member`` that its hold under ``fence`` has begun. Returns False if it cannot be told."""
        try:
            os.eventfd_write(self._alarms[member], fence)
        except (KeyError, OSError):  # not introduced, or it has not read others for long
            return False
        return True

    def close(self) -> None:
        while self._alarms:
            os.close(self._alarms.popitem()[1])
