"""What reduces DDP's buckets: plain all-reduces at first, then the pipeline, under the plan in force.

Asks ``plan`` for a plan once DDP's buckets have settled and the use order of parameters is known, switches plans
between iterations, and has DDP's buckets follow the plan.

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.comm.all_reduce import all_reduce_sum
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.sums import RankWeights, scale_into
from ddp_crossover.comm.wire import Wire
from ddp_crossover.compute_waits import ComputeWaits
from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.fusion import FusionPlan, Schedule
from ddp_crossover.hook.buckets import Buckets, LayoutRecorder, may_skip_buckets
from ddp_crossover.hook.forwards import UseOrder
from ddp_crossover.hook.plain_all_reduce import PlainAllReduce
from ddp_crossover.hook.reduction import Reduction
from ddp_crossover.hook.weighing import Weighing
from ddp_crossover.moments import Moments
from ddp_crossover.pending.kept_gradients import KeptGradients
from ddp_crossover.pending.lazy_param import LazyParam
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.pending.reduced_gradients import ReducedGradients
from ddp_crossover.pipeline.codes import NO_CODES, Codes
from ddp_crossover.plan.compute_profiler import ComputeProfiler
from ddp_crossover.plan.session import Orders, Planning
from ddp_crossover.report.stats import FallbackLog
from ddp_crossover.step.deferred_updates import DeferredUpdates
from ddp_crossover.torch_internals.ddp import GradBucket

NOT_FASTER = (
    "the pipeline is not clearly faster than plain all-reduces here, so these are used and nothing is deferred; set "
    "fusion_mb to use the pipeline anyway"
)


class PlanInForce:
    """What reduces the buckets of one DDP model, from one iteration to the next.

    Args:
        ddp: the model.
        params: the parameters that DDP manages, with their pending updates.
        link: runs the legs.
        planning: makes the plans.
        updates: defers the optimizers' updates, which a pipeline asks for.
        moments: those of the model's training.
        compute_waits: what waits of compute go through.
        weights: what each rank's gradients are multiplied by.
        weighing: says what the gradients of each rank weigh, and whether that may soon change.
        use_order: the order in which forward uses parameters.
        buckets: DDP's buckets, which are changed with the plan.
        memory: arenas for the first pipeline, large enough for every plan.
        wire: what gradients are on the wire.
        codes: what travels as codes.
        plain_reason: why every bucket goes through a plain all-reduce, or None.
        owners: with a sharded optimizer, the ranks that update whole parameters; else None.

    Attributes:
        pipeline: the pipeline under the plan in force; None while buckets go through plain all-reduces.
        layouts: the buckets that the last backward passes had.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        params: LazyParams,
        link: Link,
        planning: Planning,
        updates: DeferredUpdates,
        moments: Moments,
        compute_waits: ComputeWaits,
        *,
        weights: RankWeights,
        weighing: Weighing,
        use_order: UseOrder,
        buckets: Buckets,
        memory: Mapping[str, Tensor],
        wire: Wire,
        codes: Codes,
        plain_reason: str | None,
        owners: Mapping[int, int] | None,
    ) -> None:
        self.pipeline: Pipeline | None = None
        self.layouts = LayoutRecorder([lazy.parameter for lazy in params.all])
        self.buckets = buckets
        self.codes = codes
        self.plain_reason = plain_reason
        # Weak: DDP's C++ reducer, which is opaque to the garbage collector, holds this object.
        self._ddp = weakref.ref(ddp)
        self._process_group = ddp.process_group
        self._params = params
        self._link = link
        self._planning = planning
        self._updates = updates
        self._moments = moments
        self._compute_waits = compute_waits
        self._profiler: ComputeProfiler | None = None
        self._weights = weights
        self._weighing = weighing
        self._use_order = use_order
        self._memory = memory
        self._wire = wire
        self._owners = owners
        self._kept = KeptGradients()
        device = params.all[0].parameter.device
        self._plain = PlainAllReduce(link, compute_waits, device, wire, weights)
        # Of two values there is one sum; more are added in another order by the backend than by us, and runs repeat.
        self._can_leave = link.world_size <= 2 or not link.adds_in_rank_order
        all_reduce = self._all_reduce_as_ddp if self._can_leave else None
        self._as_built = PlainAllReduce(link, compute_waits, device, wire, weights, all_reduce)

    def _all_reduce_as_ddp(self, bucket: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        return all_reduce_sum(buffer, self._process_group, self._link.clock, bucket, self._link.all_reduce_stream)

    def reduce_after_detach(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """All-reduce a bucket as DDP does without a hook."""
        buffer = bucket.buffer().detach()
        scale_into(buffer, buffer, self._weights.own)
        if bucket.is_last():
            self._weights.set_counts([1] * len(self._weights.of_ranks))  # later batches have equal sizes
        return all_reduce_sum(buffer, self._process_group, stream=self._link.all_reduce_stream)

    @property
    def reduction(self) -> Reduction:
        """What reduces buckets now."""
        if self.pipeline is not None:
            return self.pipeline
        as_built = self.buckets.are_as_built and self._planning.takes_buckets_as_built
        return self._as_built if as_built else self._plain

    def drop_references(self) -> None:
        """Drop all tensors of the model now, without waiting for garbage collection."""
        if self.pipeline is not None:
            self.pipeline.drop_references()
        self._memory = {}
        self.buckets.drop_references()

    # Pending gradients, for those who cannot leave them pending.

    @property
    def _pending(self) -> ReducedGradients | None:
        if self.pipeline is None or self.pipeline.phase is not Phase.REDUCED:
            return None
        return self.pipeline.gradients

    def finish_gradients(self) -> bool:
        """Wait for all pending gradients and put them into ``.grad``; returns whether any was pending."""
        return (pending := self._pending) is not None and pending.unwrap()

    def finish_local_gradients(self) -> bool:
        """As :meth:`finish_gradients`, without what it would have to ask other ranks for."""
        return self._owners is None and self.finish_gradients()

    def deliver_gradients(self) -> None:
        """Wait for all pending gradients, which other ranks may clip on shards, so they stay what they are."""
        if self._owners is not None:
            return  # they may be spread over ranks, which need not fork, too; the child loses them
        if (pending := self._pending) is not None:
            pending.deliver()

    def finish_gradients_in_child(self) -> None:
        """Leave no pending gradient behind in a forked child, which has no threads that bring one."""
        if self._owners is None:
            self.finish_gradients()
        elif (pending := self._pending) is not None:
            pending.abandon()

    # Between iterations.

    def choose(self) -> None:
        """Take the next plan, if there is one. Called when a backward begins."""
        if self.plain_reason is not None or not self._use_order.is_known:
            return
        if not self._weighing.is_settled:
            return  # compute times would be those of other shares
        # DDP may order new buckets in another way each time. No reason to plan anew: any plan takes any buckets.
        if not self.buckets.were_changed and self.layouts.settled_anew():
            with self._compute_waits.others.released():
                plan = self._planning.begin(Orders(self.layouts.arrival_order(), self._use_order.ranks()))
            self._use(plan)
            self.layouts.adopt()
        elif self._planning.has_begun and (change := self._planning.at_step_boundary()) is not None:
            self._use(change)

    def _use(self, plan: FusionPlan) -> None:
        """Switch plans. No update is pending, and no leg is under way."""
        if self.pipeline is not None:
            # A plan without codes leaves arenas of codes alone.
            self._memory = {**self._memory, **self.pipeline.release()}
        if plan.schedule is Schedule.ALLREDUCE:
            self._link.use_arenas(self._memory.values())
            self.pipeline = None
        else:
            self.pipeline = self._make_pipeline(plan)
        self._measure(self._planning.profiler)
        self._updates.use(self.pipeline)

    def _measure(self, profiler: ComputeProfiler | None) -> None:
        if self._profiler is not None:
            self._moments.leave(self._profiler)
        if profiler is not None:
            self._moments.follow(profiler, inside=True)
        self._profiler = profiler

    @property
    def has_begun(self) -> bool:
        """Whether a first plan was made."""
        return self._planning.has_begun

    @property
    def sees_all_uses(self) -> bool:
        """Whether the first use of each parameter is of interest, and not only that of each fusion group."""
        return self._profiler is not None or not self._planning.has_begun

    def begin_forward(self) -> Callable[[LazyParam], None]:
        """Begin a forward, and return what notes the uses of its parameters."""
        note_use = self._use_order.begin_forward()
        if (profiler := self._profiler) is None:
            return note_use

        def note(lazy: LazyParam) -> None:
            note_use(lazy)
            profiler.used((lazy.index,))

        return note

    def end_forward(self) -> None:
        """Follow the order in which the forward that has ended used parameters, if it has changed."""
        if self._use_order.end_forward():
            self.reduction.follow(self._use_order.ranks())

    def _make_pipeline(self, plan: FusionPlan) -> Pipeline:
        ddp = self._ddp()
        assert ddp is not None  # the model is running
        return Pipeline(
            plan,
            self._params.all,
            self._link,
            self._compute_waits,
            self._updates.runner,
            self._kept,
            lock=self._params.lock,
            memory=self._memory,
            wire=self._wire,
            weights=self._weights,
            codes=self.codes,
            owners=self._owners or {},
            every_group_arrives=not may_skip_buckets(ddp),
            may_leave_out=ddp.find_unused_parameters,
            in_buckets=ddp.gradient_as_bucket_view,
        )

    @property
    def _leaves(self) -> bool:
        """Whether DDP is to be left alone, because its own all-reduces are the plan for good."""
        is_final = self._planning.settled and self.pipeline is None
        return is_final and self._can_leave and self._planning.may_leave_ddp_alone

    def say_why_plain(self, fallbacks: FallbackLog) -> None:
        """Note why gradients go through plain all-reduces for good, if they do, and DDP will not be left alone."""
        is_not_faster = self._planning.has_begun and self._planning.settled and not self._leaves
        if (reason := NOT_FASTER if is_not_faster else self.plain_reason) is not None:
            fallbacks.note(reason, is_said=self._planning.result is not None)  # the tuner says what it found

    def follow(self) -> str | None:
        """Give DDP the buckets that the plan wants; returns a sentence if DDP is to be left alone instead, or None.

        A plan is chosen in a backward, when DDP's buckets are in use. All ranks have chosen the same, and each follows
        at its next forward, so they have the same buckets when the next gradients are reduced.
        """
        why = self._planning.progress() if self._leaves else self._planning.why_not_at_all()
        if why is not None:
            if self._leaves and not self._planning.takes_buckets_as_built:
                self.buckets.stay_small()
            return f"DDP trains {self.buckets.when_left}: {why}"
        if self._planning.has_begun and self.buckets.change(as_built=self._planning.takes_buckets_as_built):
            self.layouts.begin_anew()
        if self._planning.settled and (self.pipeline is None or not self.pipeline.plan.is_coded):
            self.codes = NO_CODES  # the tuner has declined them, if there were any
        if self._memory and self._planning.has_begun and self._planning.settled:
            self._memory = {}  # the pipeline has what it uses
            if self.pipeline is None:
                self._link.use_arenas(())
        return None
