"""Hosts with an arbiter each, and jobs with a rank on every host, in simulated time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from itertools import count
from typing import NamedTuple

from ddp_crossover.addons.lease.broker.arbiter import Arbiter, Grant
from ddp_crossover.addons.lease.broker.jobs import JobKey
from ddp_crossover.addons.lease.protocol import Role

GPU = "GPU-0"
Rank = Generator[Callable[["_Rank"], None], None, None]
"""A rank says what it waits for: a function that sees to it that the rank is resumed."""


class Turn(NamedTuple):
    """What a job held on a host, and in which of its steps."""

    job: str
    step: int
    start_s: float
    end_s: float


class _Rank:
    def __init__(self, cluster: Cluster, job: str, host: int, member: int) -> None:
        self.cluster, self.job, self.host, self.member = cluster, job, host, member
        self.step = 0
        self.fence = 0
        self.request = 0
        self.held_since_s = 0.0

    def resume_at(self, time_s: float) -> None:
        self.cluster.at(time_s, self._advance)

    def run(self, body: Rank) -> None:
        self._body = body
        self._advance()

    def _advance(self) -> None:
        next(self._body)(self)


class Cluster:
    """``jitter_s``: how much later than another a rank may see what both see at once."""

    def __init__(self, hosts: int, jitter_s: float, seed: int) -> None:
        self.now_s = 0.0
        self.turns: list[list[Turn]] = [[] for _ in range(hosts)]
        self.arbiters = [Arbiter(first_fence=1) for _ in range(hosts)]
        self._ranks: list[dict[int, _Rank]] = [{} for _ in range(hosts)]
        self._rng = random.Random(seed)
        self._jitter_s = jitter_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._barriers: dict[tuple[str, int], list[_Rank]] = {}

    def at(self, time_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._number), what))

    def add(self, job: str, host: int, start_s: float, body: Callable[[Cluster, _Rank], Rank]) -> None:
        member = len(self._ranks[host]) + 1
        self.arbiters[host].join(member, JobKey(0, job), GPU, Role.PEER, 1.0)
        rank = self._ranks[host][member] = _Rank(self, job, host, member)
        self.at(start_s, lambda: rank.run(body(self, rank)))

    def run(self, until_s: float) -> None:
        while self._events[0][0] < until_s:
            self.now_s, _, what = heapq.heappop(self._events)
            what()

    # ---- what ranks wait for

    def acquire(self, rank: _Rank) -> None:
        rank.request += 1
        self._grant(rank.host, self.arbiters[rank.host].request(rank.member, rank.request, self.now_s))

    def release(self, rank: _Rank) -> None:
        self.turns[rank.host].append(Turn(rank.job, rank.step, rank.held_since_s, self.now_s))
        fence, rank.fence = rank.fence, 0
        self._grant(rank.host, self.arbiters[rank.host].release(rank.member, fence, 0, self.now_s))
        rank.resume_at(self.now_s)

    def sleep(self, seconds: float) -> Callable[[_Rank], None]:
        return lambda rank: rank.resume_at(self.now_s + seconds)

    def exchange(self, link_s: float) -> Callable[[_Rank], None]:
        """Wait for all ranks of the job, then for the link."""

        def arrive(rank: _Rank) -> None:
            ranks = self._barriers.setdefault((rank.job, rank.step), [])
            ranks.append(rank)
            if len(ranks) == len(self.arbiters):
                for each in ranks:
                    each.resume_at(self.now_s + link_s + self._rng.uniform(0, self._jitter_s))

        return arrive

    # ---- inside

    def _grant(self, host: int, grants: list[Grant]) -> None:
        for member, request, fence in grants:
            rank = self._ranks[host][member]
            assert request == rank.request
            rank.fence, rank.held_since_s = fence, self.now_s
            rank.resume_at(self.now_s)
        self._watch(host)

    def _watch(self, host: int) -> None:
        """End a reservation when its time is over, as the broker does."""
        for until_s in self.arbiters[host].reserved().values():
            self.at(until_s, lambda: self._look(host))

    def _look(self, host: int) -> None:
        for resource, until_s in self.arbiters[host].reserved().items():
            if until_s <= self.now_s:
                self._grant(host, self.arbiters[host].end_reservation(resource, self.now_s))


def plain_steps(compute_s: float, link_s: float, late_s: float = 0.0) -> Callable[[Cluster, _Rank], Rank]:
    """A step computes, then communicates. ``late_s``: what this rank does by itself before it asks."""

    def body(cluster: Cluster, rank: _Rank) -> Rank:
        while True:
            if late_s:
                yield cluster.sleep(late_s)
            yield cluster.acquire
            yield cluster.sleep(compute_s)
            yield cluster.release
            yield cluster.exchange(link_s)
            rank.step += 1

    return body
