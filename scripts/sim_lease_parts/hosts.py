"""Hosts in virtual time: threads of which one runs at a time, the earliest, and a GPU that follows them."""

import math
import threading
from collections.abc import Callable

from sim_lease_parts.gpu import Event, Gpu

# A host that looks again and again at something costs this much time per look, at least.
_LOOK_S = 1e-6
# In real time. A host that has nothing to do sleeps for as long as the others run.
_HANGS_S = 3600.0


class _Host:
    def __init__(self, wakes: float | Event) -> None:
        self.wakes = wakes
        self.turn = threading.Semaphore(0)

    def sleeps_until(self, wakes: float | Event) -> None:
        self.wakes = wakes


class Hosts:
    """One clock for all hosts.

    Args:
        gpu: what they queue kernels on.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._hosts: dict[int, _Host] = {}
        self._failed: BaseException | None = None

    @property
    def now_s(self) -> float:
        return self._gpu.now_s

    def spend(self, seconds: float) -> None:
        """The calling host computes or sleeps for a while, and others go on meanwhile."""
        self._sleep(self.now_s + max(seconds, _LOOK_S))

    def sleep_until(self, event: Event) -> None:
        """The calling host sleeps until the GPU has come to an event."""
        if event.at_s is None:
            self._sleep(event)

    def run(self, *jobs: Callable[[], None]) -> None:
        """Run these hosts from now on until the last has ended; the first error ends all."""
        threads = [threading.Thread(target=self._host, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
            assert thread.ident is not None
            self._hosts[thread.ident] = _Host(self.now_s)
        self._pass_on()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed

    def _host(self, job: Callable[[], None]) -> None:
        me = threading.get_ident()
        while me not in self._hosts:
            pass
        self._wait_for_turn(self._hosts[me])
        try:
            job()
        except BaseException as error:
            self._failed = self._failed or error
        finally:
            del self._hosts[me]
            self._pass_on()

    def _sleep(self, wakes: float | Event) -> None:
        me = self._hosts[threading.get_ident()]
        me.sleeps_until(wakes)
        if self._pass_on() is not me:
            self._wait_for_turn(me)
        else:
            me.turn.acquire()

    def _wait_for_turn(self, me: _Host) -> None:
        if not me.turn.acquire(timeout=_HANGS_S):
            raise AssertionError("the other hosts hang")
        if self._failed is not None:
            raise SystemExit("another host has failed")

    def _pass_on(self) -> _Host | None:
        """Let time pass until the first host wakes, and let it run."""
        if not self._hosts:
            return None
        hosts = list(self._hosts.values())
        if self._failed is not None:
            for host in hosts:
                host.turn.release()
            return None
        timed = [host for host in hosts if isinstance(host.wakes, float)]
        first = min(timed, key=lambda host: host.wakes, default=None)  # type: ignore[arg-type,return-value]
        until_s = first.wakes if first is not None else math.inf
        assert isinstance(until_s, float)
        awaited = {host.wakes: host for host in hosts if isinstance(host.wakes, Event)}
        self._gpu.advance(until_s, tuple(awaited))
        for event, host in awaited.items():
            if event.at_s is not None:
                first = host
                break
        assert first is not None
        first.turn.release()
        return first
