"""Any sequence of what members may do, right or wrong, against a model of what they have been told."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ddp_crossover.addons.lease.broker.arbiter import Arbiter, Grant
from ddp_crossover.addons.lease.broker.fairness import AHEAD_S, EQUAL_S
from ddp_crossover.addons.lease.broker.jobs import JobKey
from ddp_crossover.addons.lease.broker.ties import LONGEST_S
from ddp_crossover.addons.lease.protocol import Role
from ddp_crossover.addons.lease.shared_memory import Successor

RESOURCES = ["GPU-0", "GPU-1"]
JOBS = {
    JobKey(0, "a"): (Role.PEER, 1.0),
    JobKey(0, "b"): (Role.PEER, 4.0),
    JobKey(1, "a"): (Role.PEER, 1.0),
    JobKey(0, "filler"): (Role.FILLER, 1.0),
}

jobs = st.sampled_from(sorted(JOBS))
resources = st.sampled_from([RESOURCES[0], RESOURCES[0], RESOURCES[0], RESOURCES[1]])
# Which of the members there are. More than there will ever be, so that shrinking works.
picks = st.integers(0, 30)


class ArbiterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arbiter = Arbiter(first_fence=1)
        self.now_s = 0.0
        self.members: dict[int, tuple[JobKey, str]] = {}
        self.last_request: dict[int, int] = {}
        self.waiting: dict[int, int] = {}  # member: request
        self.told: dict[int, int] = {}  # member: fence under which it believes to hold
        self.owners: dict[int, tuple[JobKey, str]] = {}  # of every fence there was
        self.promised: dict[str, list[Successor]] = {resource: [] for resource in RESOURCES}  # in the current hold
        self.reserved: set[str] = set()  # before the arbiter was called last
        self.handed = 0  # the fence under which a holder has just handed over
        self.next_member = 1

    # ---- what members do

    # A crowd from the start, most of it on one resource: that is where things go wrong.
    @initialize(joins=st.lists(st.tuples(jobs, resources), min_size=4, max_size=8))
    def open_with_a_crowd(self, joins: list[tuple[JobKey, str]]) -> None:
        for key, resource in joins:
            self.join(key, resource)

    @rule(key=jobs, resource=resources)
    def join(self, key: JobKey, resource: str) -> None:
        if len(self.members) < 8:
            role, weight = JOBS[key]
            self.arbiter.join(self.next_member, key, resource, role, weight)
            self.members[self.next_member] = (key, resource)
            self.last_request[self.next_member] = 0
            self.next_member += 1

    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        if member := self._pick(pick):
            self.waiting.pop(member, None)
            self.told.pop(member, None)
            grants = self.arbiter.leave(member, self.now_s)
            del self.members[member]
            self._hear(grants)

    # Several at once, as nothing happens without somebody who waits.
    @rule(some=st.lists(picks, min_size=1, max_size=4))
    def request(self, some: list[int]) -> None:
        for member in filter(None, map(self._pick, some)):
            self._request(member)

    @rule(pick=picks, again=st.booleans())
    def release(self, pick: int, again: bool) -> None:
        member = self._pick(pick)
        if member and member in self.told:
            request = 0
            if again:
                self.last_request[member] += 1
                request = self.waiting[member] = self.last_request[member]
            fence = self.told.pop(member)
            self._hear(self.arbiter.release(member, fence, request, self.now_s))

    # To whom the holder may hand over, or might until a moment ago.
    @rule(resource=resources, age=st.integers(0, 2))
    def hand_over(self, resource: str, age: int) -> None:
        promises = self.promised[resource][-1 - age :]
        if not promises:
            return
        [holder] = self.arbiter.holders(resource)
        waits = self.waiting.get(promises[0].member) == promises[0].request
        self.handed = promises[0].fence if waits else 0
        fence = self.told.pop(holder)
        grants = self.arbiter.release(holder, fence, 0, self.now_s, promises[0].fence)
        self._hear(grants)
        if waits:
            assert Grant(promises[0].member, promises[0].request, promises[0].fence) in grants

    # A tie: the GPU may be reserved for other jobs when those that went first come again.
    @rule(some=st.lists(picks, min_size=2, max_size=4), again=st.integers(0, 4))
    def come_together(self, some: list[int], again: int) -> None:
        members = sorted(filter(None, map(self._pick, some)), key=self.members.__getitem__, reverse=True)
        for member in members:
            self._request(member)
        for _ in members:
            self.now_s += 0.05
            for member in members:
                if member in self.told:
                    self._hear(self.arbiter.release(member, self.told.pop(member), 0, self.now_s))
        for member in members[:again]:
            self._request(member)

    # Of the last request, or of one that comes later.
    @rule(pick=picks, ahead=st.integers(0, 1))
    def cancel(self, pick: int, ahead: int) -> None:
        if member := self._pick(pick):
            self.last_request[member] += ahead
            self.waiting.pop(member, None)
            self.told.pop(member, None)
            self._hear(self.arbiter.cancel(member, self.last_request[member], self.now_s))

    @rule(pick=picks, age=st.integers(0, 3), fence=st.integers(0, 30))
    def say_what_is_stale(self, pick: int, age: int, fence: int) -> None:
        if member := self._pick(pick):
            last_request = self.last_request[member]
            assert self.arbiter.request(member, last_request - age, self.now_s) == []
            assert self.arbiter.cancel(member, last_request - 1 - age, self.now_s) == []
            if self.told.get(member) != fence:
                assert self.arbiter.release(member, fence, 0, self.now_s) == []

    # ---- what happens to them

    @rule(seconds=st.sampled_from([EQUAL_S / 4, 2 * EQUAL_S, 0.05, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def evict_who_is_overdue(self) -> None:
        for resource in self.arbiter.overdue(self.now_s):
            assert resource in self.arbiter.contended()
            # Those evicted are not told: they go on believing in a fence that is stale.
            self._hear(self.arbiter.evict(resource, self.now_s))

    @rule()
    def end_reservations_that_are_over(self) -> None:
        for resource, until_s in self.arbiter.reserved().items():
            if until_s <= self.now_s:
                self._hear(self.arbiter.end_reservation(resource, self.now_s))
                assert resource not in self.arbiter.reserved()

    # ---- what must hold

    @invariant()
    def a_promise_is_for_who_is_next(self) -> None:
        for resource in self.arbiter.contended():
            self.arbiter.renew_promise(resource)  # as the broker does with each beat: a hold elsewhere may have ended
        for resource in RESOURCES:
            view = self.arbiter.view(resource)
            promise, promises = view.successor, self.promised[resource]
            if (promises and promises[0].fence <= view.fence) or not view.fence or not promise.fence:
                promises.clear()
            if promise.fence:
                assert promise.fence > view.fence
                assert self.waiting[promise.member] == promise.request
                key, holder = self.members[promise.member][0], self.arbiter_holder(resource)
                waiting = [member for member in self.waiting if self.members[member] == (key, resource)]
                assert waiting == [promise.member]
                assert holder is not None and holder != key and holder.uid == key.uid
                assert len(self.arbiter.holders(resource)) == 1
                self._must_have_been_next(key, resource)
                promises.append(promise)

    @invariant()
    def one_job_holds_under_a_valid_fence(self) -> None:
        for resource in RESOURCES:
            fence = self.arbiter.view(resource).fence
            believers = {m for m, f in self.told.items() if f == fence and self.members[m][1] == resource}
            known = self.arbiter.holders(resource) if resource in self.arbiter.resources() else frozenset()
            assert believers == known
            assert (fence == 0) == (not believers)
            assert {self.members[member][0] for member in believers} <= {self.arbiter_holder(resource)}

    @invariant()
    def no_waiter_is_lost(self) -> None:
        for resource in RESOURCES:
            jobs = {self.members[member][0] for member in self.waiting if self.members[member][1] == resource}
            if not jobs:
                continue
            assert set(self.arbiter.queue(resource)) == jobs
            holder = self.arbiter_holder(resource)
            if holder is None:
                assert self.arbiter.reserved()[resource] <= self.now_s + LONGEST_S
                assert self.arbiter.view(resource).waiters == len(jobs) == 1
                continue
            assert resource not in self.arbiter.reserved()
            assert jobs != {holder}, "ranks of the holder wait though no other job does"
            assert self.arbiter.view(resource).waiters == len(jobs - {holder})

    def teardown(self) -> None:
        """Let everybody who holds release: each turn must serve somebody, until nobody waits."""
        while self.waiting:
            before = len(self.waiting)
            self.now_s += 1.0
            self.end_reservations_that_are_over()
            for resource in self.arbiter.resources():
                for member in self.arbiter.holders(resource):
                    self._hear(self.arbiter.release(member, self.told.pop(member), 0, self.now_s))
            assert len(self.waiting) < before

    # ---- the model

    def arbiter_holder(self, resource: str) -> JobKey | None:
        return self.arbiter.holding_job(resource) if resource in self.arbiter.resources() else None

    def _pick(self, pick: int) -> int | None:
        return sorted(self.members)[pick % len(self.members)] if self.members else None

    def _request(self, member: int) -> None:
        self.last_request[member] += 1
        self.waiting[member] = self.last_request[member]
        self._hear(self.arbiter.request(member, self.last_request[member], self.now_s))

    def _hear(self, grants: list[Grant]) -> None:
        for member, request, fence in grants:
            key, resource = self.members[member]
            newest = max((f for f, (_, where) in self.owners.items() if where == resource), default=0)
            assert self.waiting.pop(member) == request
            self.told[member] = fence
            # A fence is new, or that of the hold which its job has already.
            assert self.owners.setdefault(fence, (key, resource)) == (key, resource)
            if fence == self.handed:
                continue  # its holder was told so, before another came
            if fence > newest:
                self._must_have_been_next(key, resource)
            else:
                assert fence == self.arbiter.view(resource).fence
        self.reserved = set(self.arbiter.reserved())

    def _must_have_been_next(self, key: JobKey, resource: str) -> None:
        for rival in self.arbiter.queue(resource):
            assert JOBS[key][0] <= JOBS[rival][0], "a filler went before a peer"
            # A reserved resource goes to the job for which it was reserved.
            if rival != key and JOBS[key][0] is JOBS[rival][0] and resource not in self.reserved:
                assert self.arbiter._jobs[key].virtual_s <= self.arbiter._jobs[rival].virtual_s + AHEAD_S


ArbiterMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestArbiterStates = ArbiterMachine.TestCase
