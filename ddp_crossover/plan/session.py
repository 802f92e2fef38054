"""Chooses the plan in force: a first plan, then the one planned from measured times, then those that the tuner tries.

Decisions are made by rank 0, or from numbers that all ranks have exchanged, at the beginning of a backward pass, when
no update is pending and nothing is on the wire. Ranks compare their plans before they run them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ddp_crossover.comm.agreement import all_gather_json, require_equal
from ddp_crossover.comm.leg import MAX_GROUPS
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.wire import Wire
from ddp_crossover.compute_waits import OtherJobs
from ddp_crossover.fusion import MB, FusionPlan, Schedule
from ddp_crossover.log import logger, say
from ddp_crossover.options import Options
from ddp_crossover.plan.compute_profiler import ComputeProfiler, Stopwatch
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel
from ddp_crossover.plan.cutting import plan_fusion
from ddp_crossover.plan.ddp_buckets import leaves_nothing_to_gain
from ddp_crossover.plan.gradient_specs import ShardKind, gradient_specs
from ddp_crossover.plan.link_probe import probe_link
from ddp_crossover.plan.model_profile import ModelProfile
from ddp_crossover.plan.progress import coming, given_plan, outcome
from ddp_crossover.plan.search import CANDIDATES_MB, HOST_PER_GROUP_S, PlannedStep, Problem, choose_plan
from ddp_crossover.plan.trial_timer import TrialTimer
from ddp_crossover.plan.trials import Candidate
from ddp_crossover.plan.tuned_file import TunedMemory
from ddp_crossover.plan.tuner import Tuner, TuningResult

# The plan before any measurement: the number of groups to aim for, and bounds of the group size in MiB.
_FIRST_GROUPS = 16
_FIRST_MB = (0.25, 8.0)
# A host that takes longer for a group than this has waited for the device.
_MOST_HOST_S = 1e-3


class Stage(enum.Enum):
    """How far planning has come."""

    OBSERVING = "learning DDP's buckets and the order in which forward uses parameters"  # -> PROFILING or SETTLED
    PROFILING = "measuring compute times under a first plan"  # -> TUNING, or SETTLED without a tuner
    TUNING = "the tuner tries plans"  # -> SETTLED
    SETTLED = "the plan is final"  # -> PROFILING: DDP's buckets have changed


class Orders(NamedTuple):
    """Arrival order and use order, as observed in two forwards and two backward passes. All ranks use rank 0's.

    Attributes:
        arrival: parameter indices in the order in which their gradients arrive.
        use_rank: per parameter, its place in the order of first use.
    """

    arrival: list[int]
    use_rank: list[int]


class Planning:
    """Makes the plans of one model. All ranks must call each method in the same iteration.

    Args:
        named: names and parameters that DDP manages.
        options: the user's options.
        wire: what they ask to send.
        link: link between the ranks.
        backend: backend of the process group, such as ``"gloo"``.
        others: who else may use the device, as they do while ranks exchange messages. A trial that they have disturbed
            is repeated.
        bucket_cap_mb: maximum size of DDP's buckets before attach, in MiB; None if DDP as it was is no choice.
        kinds: with a sharded optimizer, how the shards of each parameter differ from those of others.

    Attributes:
        specs: the gradients.
        plain_specs: the gradients if nothing is coded.
        takes_buckets_as_built: whether the plan in force is DDP as it was before attach.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        options: Options,
        wire: Wire,
        link: Link,
        backend: str,
        others: OtherJobs,
        bucket_cap_mb: float | None,
        kinds: Sequence[ShardKind] = (),
    ) -> None:
        self.specs = gradient_specs(named, wire, kinds)
        self.plain_specs = gradient_specs(named, wire.plain, kinds)
        self._options = options
        self._wire = wire
        self._has_codes = any(spec.is_coded for spec in self.specs)
        self._codec_s_per_element = 0.0
        self._link = link
        self._device = named[0][1].device
        self._index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        self._memory = TunedMemory(named, options, link, backend)
        self._model_bytes = round(sum(spec.wire_bytes for spec in self.specs))
        self._plain_bytes = round(sum(spec.wire_bytes for spec in self.plain_specs))
        self._orders = Orders([], [])
        self._tuner: Tuner | None = None
        self._others = others
        self._timer = TrialTimer(link, self._device, others, Stopwatch(self._device))
        self._exposed_s: dict[Candidate, float] = {}
        self._plans: dict[Candidate, FusionPlan] = {}
        self._predicted: Candidate | None = None
        self._bucket_cap_mb = bucket_cap_mb
        self._host_per_group_s = HOST_PER_GROUP_S
        self.takes_buckets_as_built = False
        self.stage = Stage.OBSERVING
        self.link_model: LinkModel | None = None
        self.compute: ComputeProfile | None = None
        self._rank_compute_s: tuple[float, ...] = ()
        self.result: TuningResult | None = None
        self.profiler: ComputeProfiler | None = None

    def begin(self, orders: Orders) -> FusionPlan:
        """Make the first plan, once DDP's buckets have settled.

        Args:
            orders: orders that this rank observed; those of rank 0 are used.

        Raises:
            DisagreementError: if gradients arrive in another order than on rank 0.
            ValueError: if the plan has more fusion groups than the link can number.
        """
        of_ranks = self._exchange(orders)
        require_equal("arrival order", {"arrival order": orders.arrival}, self._link.process_group, self._device)
        self._orders = Orders(*of_ranks[0])
        self._tuner = self.result = None
        self.takes_buckets_as_built = False
        self._exposed_s.clear()
        self._plans.clear()
        self._timer.reset()
        self.profiler = None
        is_coded = self._options.schedule is not Schedule.ALLREDUCE
        plan = self._checked(self._cut(self._first_mb(), self._options.schedule, is_coded=is_coded))
        self.stage = Stage.SETTLED
        is_planned = self._options.fusion_mb is None or not self._link.chooses_gather_order
        if self._options.schedule is Schedule.AUTO and is_planned:
            self.stage = Stage.PROFILING
            self.profiler = ComputeProfiler(Stopwatch(self._device), self._index_of)
        return plan

    def why_not_at_all(self) -> str | None:
        """Why DDP should train as it was from the first step on, or None."""
        if self._bucket_cap_mb is None:
            return None
        if self._link.world_size == 1:
            return "there is one rank, so nothing is sent"
        if self._memory.known is not None and self._memory.known.as_built:
            return f"DDP as it was is the fastest, as stored in tuned_file {self._options.tuned_file}"
        return None

    @property
    def _may_be_plain(self) -> bool:
        """Whether gradients may also travel as they are, by plain all-reduces: what legs do does not change updates."""
        return not self._options.shard_optimizer

    @property
    def has_begun(self) -> bool:
        """Whether there has been a first plan."""
        return self.stage is not Stage.OBSERVING

    @property
    def settled(self) -> bool:
        return self.stage is Stage.SETTLED

    @property
    def may_leave_ddp_alone(self) -> bool:
        """Whether DDP may make plain all-reduces by itself, if these are the final plan."""
        return self._bucket_cap_mb is not None

    def at_step_boundary(self) -> FusionPlan | None:
        """Advance planning by one step; returns the plan to switch to now, or None to stay."""
        if self.stage is Stage.PROFILING and self.profiler is not None and self.profiler.done:
            with self._others.released():
                return self._leave_profiling()
        if self.stage is Stage.TUNING and self._timer.step_ends():
            with self._others.released():
                return self._end_trial()
        return None

    def model_profile(self) -> ModelProfile | None:
        """The measured profile, without codes, for the simulator; None until compute times have been measured."""
        if self.compute is None:
            return None
        return ModelProfile(
            tuple(self.plain_specs), self.compute, self.link_model, self._link.world_size, self._rank_compute_s
        )

    def progress(self) -> str:
        """The state of planning in one line, for people."""
        if (why := self.why_not_at_all()) is not None:
            return f"DDP will train as it was before attach, from the next step on: {why}"
        if self.stage is Stage.TUNING and self._tuner is not None:
            return self._tuner.progress()
        given = given_plan(self._options, self._first_mb(), self._memory.known)
        if self.stage is Stage.OBSERVING:
            next_one = coming(self._options, given)
            return f"waiting until DDP's buckets have settled, which takes three steps or more; then {next_one}"
        if self.stage is Stage.PROFILING:
            return f"measuring the compute times of a few steps; then {coming(self._options, given)}"
        exposed_s = None if self.result is None else self._exposed_s.get(self.result.best)
        return outcome(given, self._predicted, self.result, exposed_s)

    # Transitions between the stages.

    def measure_link(self) -> None:
        """Measure the link for later plans, and set the link's pace.

        Call it at attach: a probe allocates memory, and a backward pass has none to spare.
        """
        if self._options.schedule is not Schedule.AUTO:
            return
        measured = probe_link(self._link, self._model_bytes, self._device)
        coded_on = torch.device("cpu") if self._link.codes_on_host else self._device
        codec_s = self._wire.codec_s_per_element(coded_on) if self._has_codes else 0.0
        of_rank_0 = self._exchange({"link": measured.to_json(), "codec": codec_s})[0]
        self.link_model = LinkModel.from_json(of_rank_0["link"])
        self._codec_s_per_element = of_rank_0["codec"]
        self._link.set_pace(self.link_model.s_per_byte)

    def _leave_profiling(self) -> FusionPlan | None:
        assert self.profiler is not None
        host = self._link.meter.host
        measured_s = 2 * host.typical_s("leg") + host.typical_s("update")
        mine = {
            "compute": self.profiler.profile().to_json(),
            "host_per_group_s": min(measured_s, _MOST_HOST_S) or HOST_PER_GROUP_S,
        }
        of_ranks = self._exchange(mine)
        computes = [ComputeProfile.from_json(one["compute"]) for one in of_ranks]
        self._rank_compute_s = tuple(one.forward_s + one.backward_s for one in computes)
        self.compute = computes[0]
        self._host_per_group_s = of_ranks[0]["host_per_group_s"]
        self.profiler = None
        fixed_mb = self._options.fusion_mb
        planned = self._search(CANDIDATES_MB if fixed_mb is None else [fixed_mb])
        self.stage = Stage.SETTLED
        if fixed_mb is not None:
            return self._checked(planned.plan)
        start = self._predicted = self._best_predicted(planned)
        if self._memory.known is not None:
            self._say_what_was_decided()
            return self._plan_of(self._memory.known)
        if not self._options.tune or start.as_built:  # without trials codes are used, as asked for
            if start.as_built:
                self._say_what_was_decided()
            return self._plan_of(start)
        as_they_are = None
        if self._has_codes and self._may_be_plain:
            as_they_are = Candidate(self._search(CANDIDATES_MB, is_coded=False).plan.fusion_mb)
        self._tuner = Tuner(
            start,
            model_bytes=self._plain_bytes,
            tries_as_built=self._bucket_cap_mb is not None,
            tries_plain=self._may_be_plain,
            as_they_are=as_they_are,
            dear=Candidate(self._first_mb(), Schedule.DEAR, is_coded=self._has_codes),
            low_mb=max(0.25, self._lowest_mb()),
            groups_of=lambda candidate: self._planned(candidate).groups,
        )
        self.stage = Stage.TUNING
        plan = self._plan_of(self._tuner.candidate)
        self._timer.begin(has_new_buckets=self.takes_buckets_as_built)
        return plan

    def _best_predicted(self, planned: PlannedStep) -> Candidate:
        """The best candidate according to the cost model; DDP as it was only if nothing can be gained over it."""
        profile = self.model_profile()
        assert profile is not None
        fusion_mb = planned.plan.fusion_mb
        if self._bucket_cap_mb is not None and leaves_nothing_to_gain(profile, self._bucket_cap_mb):
            return Candidate(fusion_mb, Schedule.ALLREDUCE, as_built=True)
        if self._has_codes:
            return Candidate(fusion_mb, is_coded=True)
        prefers_allreduce = planned.prefers_allreduce and self._may_be_plain
        return Candidate(fusion_mb, Schedule.ALLREDUCE if prefers_allreduce else Schedule.AUTO)

    def _end_trial(self) -> FusionPlan | None:
        assert self._tuner is not None
        timed = self._timer.end()
        if timed is None:
            return None
        if timed.exposed_s is not None:
            self._exposed_s[self._tuner.candidate] = timed.exposed_s
        change = None
        for step_s, processor_s in zip(timed.steps_s, timed.processors_s, strict=True):
            change = self._tuner.observe(step_s, processor_s)
        had_buckets_as_built = self.takes_buckets_as_built
        plan = None if change is None else self._plan_of(change)
        if self._tuner.result is not None:
            self._settle(self._tuner.result)
        else:
            self._timer.begin(has_new_buckets=self.takes_buckets_as_built != had_buckets_as_built)
            if self._link.rank == 0:
                logger.info("%s", self._tuner.progress())
        return plan

    def _settle(self, result: TuningResult) -> None:
        self.stage = Stage.SETTLED
        self.result = result
        self._plans.clear()
        self._say_what_was_decided()
        self._memory.save(result)

    def _say_what_was_decided(self) -> None:
        if self._link.rank == 0:
            say(self.progress())

    def load_tuned(self) -> None:
        """Read the tuned file, for all ranks. Call it early, before training time could be lost to an error.

        Raises:
            TunedFileError: on every rank, if rank 0 cannot use the file.
        """
        self._memory.load()

    # Making plans.

    def _plan_of(self, candidate: Candidate) -> FusionPlan:
        # A tuned file may ask for buckets as they were where that is no choice.
        self.takes_buckets_as_built = candidate.as_built and self._bucket_cap_mb is not None
        if candidate.schedule is not Schedule.AUTO:
            return self._checked(self._cut(candidate.fusion_mb, candidate.schedule, is_coded=candidate.is_coded))
        return self._checked(self._planned(candidate))

    def _planned(self, candidate: Candidate) -> FusionPlan:
        """The best plan of a size with ``Schedule.AUTO``; the tuner asks for some more than once."""
        if candidate not in self._plans:
            self._plans[candidate] = self._search([candidate.fusion_mb], is_coded=candidate.is_coded).plan
        return self._plans[candidate]

    def _search(self, sizes_mb: Sequence[float], *, is_coded: bool = True) -> PlannedStep:
        """The best plan of these sizes; ``is_coded`` makes no difference if nothing can be coded."""
        assert self.compute is not None and self.link_model is not None
        problem = Problem(
            self.specs if is_coded else self.plain_specs,
            self._orders.arrival,
            self._orders.use_rank,
            self.compute,
            self.link_model,
            self._link.world_size,
            fused_all_reduce=self._link.has_fused_all_reduce and not self._options.shard_optimizer,
            shard_align_bytes=self._link.shard_align_bytes,
            host_per_group_s=self._host_per_group_s,
            codec_s_per_element=self._codec_s_per_element,
        )
        return choose_plan(problem, self.plain_specs, sizes_mb)

    def _cut(self, fusion_mb: float, schedule: Schedule, *, is_coded: bool) -> FusionPlan:
        orders = self._orders
        plan = plan_fusion(
            self.specs if is_coded else self.plain_specs,
            orders.arrival,
            orders.use_rank,
            world_size=self._link.world_size,
            fusion_mb=fusion_mb,
            shard_align_bytes=self._link.shard_align_bytes,
        )
        return replace(plan, schedule=schedule)

    def _first_mb(self) -> float:
        if self._options.fusion_mb is not None:
            return self._options.fusion_mb
        low_mb, high_mb = _FIRST_MB
        return max(min(self._model_bytes / MB / _FIRST_GROUPS, high_mb), low_mb, self._lowest_mb())

    def _lowest_mb(self) -> float:
        """Smallest group size in MiB that the link can number.

        The factor 2 uses half of the numbers: a gradient of another dtype may need one more group.
        """
        return max(2 * self._model_bytes / MB / MAX_GROUPS, 2**-10)

    def _checked(self, plan: FusionPlan) -> FusionPlan:
        groups = len(plan.groups)
        if groups >= MAX_GROUPS:
            raise ValueError(
                f"fusion_mb={plan.fusion_mb:g} makes {groups} fusion groups, more than {MAX_GROUPS - 1}: "
                "set a larger fusion_mb"
            )
        require_equal("fusion plan", {"digest": plan.digest()}, self._link.process_group, self._device)
        return plan

    def _exchange(self, value: Any) -> list[Any]:
        return all_gather_json(value, self._link.process_group, self._device)
