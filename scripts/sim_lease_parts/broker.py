"""A broker and its clients in virtual time: the arbiter is the package's own, messages take as long as measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ddp_crossover.addons.lease.broker.arbiter import Arbiter, Grant
from ddp_crossover.addons.lease.broker.jobs import JobKey
from ddp_crossover.addons.lease.client import GpuLease
from ddp_crossover.addons.lease.client.lease import LeaseStats
from ddp_crossover.addons.lease.protocol import Role
from ddp_crossover.addons.lease.shared_memory import ResourceState, tag_of
from sim_lease_parts.gpu import Event
from sim_lease_parts.seam import SimEvent, World

RESOURCE = "GPU-sim"
# A release to a job that waits took the host of an H200 0.7 ms; the job has the GPU so long after that.
RELEASE_S = 0.7e-3
_RELEASE_ALONE_S = 5e-5
HAND_OFF_S = 1e-4
# How often a thread of a client looks whether the GPU has done what was queued.
_POLL_S = 1e-4


class Broker:
    """Who holds the GPU."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._arbiter = Arbiter(first_fence=1)
        self._clients: dict[int, SimLease] = {}

    def join(self, lease: SimLease, role: Role) -> int:
        member = len(self._clients) + 1
        self._clients[member] = lease
        self._arbiter.join(member, JobKey(0, lease.job), RESOURCE, role, 1.0)
        return member

    def view(self) -> ResourceState:
        self._pass_time()
        return self._arbiter.view(RESOURCE)

    def request(self, member: int, number: int) -> None:
        self._pass_time()
        self._granted(self._arbiter.request(member, number, self.world.hosts.now_s))

    def release(self, member: int, fence: int, again: int = 0) -> None:
        self._pass_time()
        self._granted(self._arbiter.release(member, fence, again, self.world.hosts.now_s))

    def _pass_time(self) -> None:
        now_s = self.world.hosts.now_s
        for resource in self._arbiter.overdue(now_s):
            self._granted(self._arbiter.evict(resource, now_s))
        for resource, until_s in self._arbiter.reserved().items():
            if until_s <= now_s:
                self._granted(self._arbiter.end_reservation(resource, now_s))

    def _granted(self, grants: list[Grant]) -> None:
        for grant in grants:
            self._clients[grant.member].is_granted(grant.fence)


class SimLease(GpuLease):
    """What training and fillers use of a lease, without processes and sockets.

    Args:
        broker: who holds the GPU.
        job: the name.
        role: of the job.
    """

    def __init__(self, broker: Broker, job: str, role: Literal["peer", "filler"] = "peer") -> None:
        self.job, self.role, self.resource = job, role, RESOURCE
        self._broker, self._hosts = broker, broker.world.hosts
        self._member = broker.join(self, Role[role.upper()])
        self._fence = 0
        self._number = 0
        self._done: Callable[[], bool] | None = None
        self._is_closed = False
        self._has_work = Event()
        self._ended_s = float("-inf")
        self._grants = 0
        self._waited_s = 0.0

    def is_granted(self, fence: int) -> None:
        self._fence = fence

    # As the package's lease.

    @property
    def contended(self) -> bool:
        return self._broker.view().waiters > 0

    @property
    def pressed(self) -> bool:
        return self._broker.view().pressed > 0

    @property
    def taken(self) -> bool:
        return self._broker.view().holder not in (0, tag_of(self.job))

    @property
    def holding(self) -> bool:
        return self._done is None and self._is_held

    @property
    def draining(self) -> bool:
        return self._done is not None

    @property
    def released_s(self) -> float:
        return self._ended_s

    @property
    def undisturbed(self) -> bool:
        view = self._broker.view()
        return self._done is None and view.fence == self._fence and not view.pressed

    @property
    def asked_to_yield(self) -> bool:
        view = self._broker.view()
        return self._done is None and 0 < self._fence == view.yielding

    @property
    def connected(self) -> bool:
        return True

    def wait_until_connected(self, timeout_s: float) -> bool:
        return True

    def acquire(self, *, eager: bool = False) -> bool:
        if not self.contended:
            self._done = None
        while self._done is not None:
            self._hosts.spend(_POLL_S)
        return self._is_held or self._ask()

    def yield_turn(self, stream: Any = None) -> bool:
        if self._is_held:
            if not self.contended:
                return True
            SimEvent(self._broker.world.current_stream()).synchronize()
        return self._ask(again=self._is_held)

    def release_when(self, is_drained: Callable[[], bool] | None) -> None:
        self._hosts.spend(RELEASE_S if self.contended else _RELEASE_ALONE_S)
        if is_drained is None or is_drained():
            self._end()
        else:
            self._done = is_drained
            self._has_work.happen(self._hosts.now_s)

    def release(self, stream: Any = None) -> None:
        self.release_when(SimEvent(self._broker.world.current_stream()).query)

    def watch(self) -> None:
        """The thread that looks whether the GPU has done what was queued; ends with :meth:`close`."""
        while not self._is_closed:
            done = self._done
            if done is None:
                self._has_work = Event()
                self._hosts.sleep_until(self._has_work)
            elif done():
                self._end()
            else:
                self._hosts.spend(_POLL_S)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._has_work.happen(self._hosts.now_s)

    def stats(self) -> LeaseStats:
        return LeaseStats(self._grants, {}, 0, self._waited_s)

    @property
    def _is_held(self) -> bool:
        return 0 < self._fence == self._broker.view().fence

    def _end(self) -> None:
        if self._is_held:
            self._broker.release(self._member, self._fence)
        self._fence, self._done, self._ended_s = 0, None, self._hosts.now_s

    def _ask(self, again: bool = False) -> bool:
        before, self._fence = self._fence, 0
        self._number += 1
        begin_s = self._hosts.now_s
        if again:
            self._broker.release(self._member, before, self._number)
        else:
            self._broker.request(self._member, self._number)
        self._hosts.spend(HAND_OFF_S)
        while not self._is_held:
            self._hosts.spend(_POLL_S)
        self._grants += 1
        self._waited_s += self._hosts.now_s - begin_s
        return True
