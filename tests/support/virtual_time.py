"""Virtual time: instants that may be known only later, and hosts that take turns on one clock.

A device's work is a chain of instants. The end of an operation comes some seconds after the end of what it waits for. A
leg begins when all ranks have got to it, which is known once the last of them has launched it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# A host that looks again and again at something costs this much time per look, at least.
LOOK_S = 1e-6
LONGEST_SLEEP_S = 100.0


class Instant:
    """A point of time: `lasts_s` after all of `after`, and known as soon as they are."""

    __slots__ = ("_dependents", "_missing", "_so_far_s", "lasts_s", "s")

    def __init__(self, *after: Instant, not_before_s: float = 0.0, lasts_s: float = 0.0) -> None:
        self.s: float | None = None
        self.lasts_s = lasts_s
        self._so_far_s = not_before_s
        self._dependents: list[Instant] = []
        self._missing = 0
        for other in after:
            if other.s is None:
                self._missing += 1
                other._dependents.append(self)
            else:
                self._so_far_s = max(self._so_far_s, other.s)
        if not self._missing:
            self.s = self._so_far_s + lasts_s

    def _is_known(self) -> None:
        done = [self]
        while done:  # not recursive: chains are long
            instant = done.pop()
            instant.s = instant._so_far_s + instant.lasts_s
            for dependent in instant._dependents:
                dependent._so_far_s = max(dependent._so_far_s, instant.s)
                dependent._missing -= 1
                if not dependent._missing:
                    done.append(dependent)
            instant._dependents.clear()


class Meeting(Instant):
    """The end of something that begins when `size` ranks have come, and then takes `lasts_s`."""

    __slots__ = ("_to_come",)

    def __init__(self, size: int, lasts_s: float) -> None:
        super().__init__()
        self.s, self.lasts_s, self._missing, self._to_come = None, lasts_s, size, size

    def join(self, ready: Instant) -> None:
        """One more rank comes, when it is `ready`."""
        self._to_come -= 1
        assert self._to_come >= 0
        if ready.s is None:
            ready._dependents.append(self)
            return
        self._so_far_s = max(self._so_far_s, ready.s)
        self._missing -= 1
        if not self._missing:
            self._is_known()


class Hosts:
    """One clock for all hosts, each a thread. One runs at a time, the earliest."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._wakes_s: dict[int, float] = {}
        self._running: int | None = None
        self._changed = threading.Condition()
        self._failed: BaseException | None = None

    def spend(self, seconds: float) -> None:
        """The calling host computes or sleeps for a while, and others go on meanwhile."""
        me = threading.get_ident()
        if me not in self._wakes_s:  # the only host
            self.now_s += max(seconds, LOOK_S)
            return
        with self._changed:
            self._wakes_s[me] = self.now_s + max(seconds, LOOK_S)
            self._pass_on()
            self._wait_for_turn(me)

    def sleep_until(self, instant: Instant) -> None:
        """The calling host sleeps until an instant, which may not be known yet."""
        ends_s = self.now_s + LONGEST_SLEEP_S
        while instant.s is None or instant.s > self.now_s:
            assert self.now_s < ends_s, "it never comes"
            self.spend(1e-4 if instant.s is None else instant.s - self.now_s)

    def run(self, *jobs: Callable[[], None]) -> None:
        """Run these hosts from now on, until the last has ended; the first error ends all."""
        threads = [threading.Thread(target=self._host, args=(job,), daemon=True) for job in jobs]
        with self._changed:
            for thread in threads:
                thread.start()
                assert thread.ident is not None
                self._wakes_s[thread.ident] = self.now_s
            self._pass_on()
        for thread in threads:
            thread.join(60)
        if self._failed is not None:
            raise self._failed
        assert not any(thread.is_alive() for thread in threads), "the hosts hang"

    def _host(self, job: Callable[[], None]) -> None:
        me = threading.get_ident()
        with self._changed:
            self._wait_for_turn(me)
        try:
            job()
        except BaseException as error:
            self._failed = self._failed or error
        finally:
            with self._changed:
                del self._wakes_s[me]
                self._pass_on()

    def _pass_on(self) -> None:
        self._running = min(self._wakes_s, key=self._wakes_s.__getitem__, default=None)
        if self._running is not None:
            self.now_s = max(self.now_s, self._wakes_s[self._running])
        self._changed.notify_all()

    def _wait_for_turn(self, me: int) -> None:
        while self._running != me:
            if self._failed is not None:
                raise SystemExit("another host has failed")
            assert self._changed.wait(60), "the other hosts hang"
