"""A clock of hosts that only play: their time passes when they say so."""

from typing import Protocol


class PlayedHosts(Protocol):
    """Hosts in virtual time."""

    @property
    def now_s(self) -> float:
        """The time."""

    def spend(self, seconds: float) -> None:
        """Let time pass on the host that calls it."""


class HostClock:
    """What the package uses of the module `time`."""

    def __init__(self, hosts: PlayedHosts) -> None:
        self.sleep = hosts.spend
        self._hosts = hosts

    def perf_counter(self) -> float:
        return self._hosts.now_s

    monotonic = perf_counter
