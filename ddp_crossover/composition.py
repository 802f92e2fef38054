"""Where the parts of a state are put together: the only place that knows all of them.

An add-on is imported where its option is given, so that a model trains without those that it has not asked for. What a
user has given is checked first, then every part is made once, of parts that are finished, in one order: the link, what
to wait for beside it, plans and memory, parameters and their updates, DDP's side. What the user has asked for stays as
it is; what this model gets of it is decided here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.comm.all_reduce import family_of
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.nodes import nodes_of
from ddp_crossover.comm.sums import RankWeights
from ddp_crossover.comm.wire import Wire
from ddp_crossover.compute_waits import ComputeWaits, NoOtherJobs, OtherJobs
from ddp_crossover.fusion import MB, FusionPlan
from ddp_crossover.hook.buckets import Buckets
from ddp_crossover.hook.forwards import UseOrder
from ddp_crossover.hook.iterations import Iterations
from ddp_crossover.hook.plan_in_force import PlanInForce
from ddp_crossover.hook.ranks_apart import say_what_trains_apart
from ddp_crossover.hook.reducer import Reducer
from ddp_crossover.hook.refusals import (
    refuse_model,
    refuse_optimizers,
    refuse_shared_statistics,
    refuse_unseen_steps,
    statistics_of_a_rank,
    why_plain_all_reduce,
)
from ddp_crossover.hook.same_setup import require_same_setup
from ddp_crossover.hook.unreduced_steps import UnreducedSteps
from ddp_crossover.hook.weighing import EqualWeights, Weighing
from ddp_crossover.log import say
from ddp_crossover.moments import Moments
from ddp_crossover.nccl.make_link import make_link
from ddp_crossover.nccl.nccl_settings import refuse_unsafe_settings, why_streams_block
from ddp_crossover.options import Norms, Options, switched_off
from ddp_crossover.pending.early_reads import EarlyReads
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.pipeline.arenas import make_arenas
from ddp_crossover.pipeline.codes import NO_CODES, Codes
from ddp_crossover.plan.session import Planning
from ddp_crossover.report.clock import NOT_MEASURED
from ddp_crossover.report.recording import recording
from ddp_crossover.report.stats import DearStats, FallbackLog, in_force
from ddp_crossover.report.trace import Trace
from ddp_crossover.step.deferred_updates import DeferredUpdates
from ddp_crossover.step.update_runner import EarlyAnswers
from ddp_crossover.torch_internals.ddp import bucket_cap_bytes, managed_parameters, process_group_timeout
from ddp_crossover.torch_internals.gradient_calls import require_gradient_calls

if TYPE_CHECKING:
    from ddp_crossover.addons.lease.client import GpuLease
    from ddp_crossover.addons.lease.sharing.turn_points import TurnPoints
    from ddp_crossover.addons.lease.sharing.turns import Turns
    from ddp_crossover.addons.shards.table import ShardTable
    from ddp_crossover.addons.weights.weighted_batches import WeightedBatches


@dataclass(frozen=True)
class Parts:
    """The parts of a state, each of them finished.

    Attributes:
        device: where the parameters are.
        plain_reason: why gradients travel by plain all-reduces, or None.
        link: runs legs between the ranks.
        fallbacks: records what took a slower path.
        moments: hears of the moments of training, and tells its followers.
        compute_waits: what waits of compute go through.
        turns: takes turns on the device with other jobs; None without a lease.
        planning: makes and tunes plans.
        early_reads: records which code needs updates or gradients early.
        params: the parameters, with their pending updates.
        updates: defers the optimizers' updates.
        plan_in_force: what reduces buckets now, and the gradients that it has left pending.
        iterations: the record of what was trained.
        reducer: follows DDP's forwards and buckets.
        batches: batches of different sizes; None without ``weighted=True``.
        turn_points: where a step begins and ends its turn; None without a lease.
    """

    device: torch.device
    plain_reason: str | None
    link: Link
    fallbacks: FallbackLog
    moments: Moments
    compute_waits: ComputeWaits
    turns: Turns | None
    planning: Planning
    early_reads: EarlyReads
    params: LazyParams
    updates: DeferredUpdates
    plan_in_force: PlanInForce
    reducer: Reducer
    iterations: Iterations
    batches: WeightedBatches | None
    turn_points: TurnPoints | None

    @contextlib.contextmanager
    def traced(self) -> Iterator[Trace]:
        """Context in which a trace is recorded."""
        trace = Trace(self.link.rank, in_force(self.plan), self.device)
        with recording(trace, self.link.clock, self.moments):
            yield trace
        if (now := in_force(self.plan)) != trace.title:
            trace.title = f"{trace.title}, then {now}"

    @property
    def plan(self) -> FusionPlan | None:
        """The fusion plan in force; None in the first iterations and with plain all-reduce."""
        pipeline = self.plan_in_force.pipeline
        return pipeline.plan if pipeline is not None else None

    def stats(self) -> DearStats:
        """The figures of this rank since attach."""
        sums = self.link.clock.sums()
        times = sums if sums.are_measured else NOT_MEASURED
        steps = self.iterations.steps
        return DearStats(
            iterations=self.iterations.count,
            pipelined_iterations=self.iterations.pipelined,
            overlapped_steps=steps.overlapped,
            finished_steps=steps.finished,
            looks=dict(self.early_reads.counts),
            deferred_steps=self.updates.runner.deferred_steps,
            elapsed_s=steps.elapsed_s(),
            communication_s=times.communication_s,
            exposed_s=times.exposed_s,
            sent_bytes=self.link.sent_bytes,
            fallbacks=dict(self.fallbacks.counts),
            advice=dict(self.fallbacks.advice),
            last_steps=steps.figures(),
            lease=None if self.turns is None else self.turns.stats(),
        )


@torch.inference_mode(False)  # tensors that are made in it can never be written to outside
def compose(
    ddp: DistributedDataParallel,
    optimizers: Sequence[Optimizer],
    asked: Options,
    *,
    process_group: dist.ProcessGroup | None,
    lease: GpuLease | None,
    on_leave: Callable[[str], None],
) -> Parts:
    """Check a setup and build all parts.

    Args:
        ddp: the model.
        optimizers: its optimizers.
        asked: the options.
        process_group: for our traffic; None: one of our own.
        lease: with which jobs share the device, or None.
        on_leave: called when DDP should be left alone, with a sentence that says why. It has to detach.

    Raises:
        TypeError, ValueError: for a setup that cannot be trained exactly.
        DisagreementError: if ranks were set up differently.
    """
    refuse_model(ddp)
    refuse_optimizers(ddp, optimizers)
    named = managed_parameters(ddp)
    device = named[0][1].device
    plain_reason = why_plain_all_reduce(ddp, asked.schedule)
    group_of_legs = process_group if process_group is not None else ddp.process_group
    is_nccl = family_of(group_of_legs, device) == "nccl"
    if plain_reason is None and is_nccl:
        refuse_unsafe_settings()
    wire = _wire(asked, on_host=not is_nccl)
    link = make_link(
        ddp.process_group,
        device,
        process_group_timeout(group_of_legs, device),
        own_group=process_group,
        sums_in_fp32=wire.cast_to is not None,
        connections=asked.connections,
    )
    try:
        return _compose_on(link, ddp, named, optimizers, asked, wire, plain_reason, lease, on_leave)
    except BaseException:
        link.shut_down()
        raise


def _compose_on(
    link: Link,
    ddp: DistributedDataParallel,
    named: Sequence[tuple[str, Parameter]],
    optimizers: Sequence[Optimizer],
    asked: Options,
    wire: Wire,
    plain_reason: str | None,
    lease: GpuLease | None,
    on_leave: Callable[[str], None],
) -> Parts:
    parameters = [parameter for _, parameter in named]
    device = parameters[0].device
    fallbacks = FallbackLog(link.rank)
    moments = Moments(ddp, optimizers)
    require_same_setup(link, named, optimizers, asked)
    if asked.weighted:
        refuse_shared_statistics(ddp.module)
        refuse_unseen_steps(optimizers)
    if not switched_off():
        say_what_trains_apart(ddp, link)
    options = asked
    if link.world_size == 1:  # one rank has nothing to share, and sends nothing
        options = dataclasses.replace(asked, shard_optimizer=False, groups=None)
        wire = wire.plain
    if options.groups is not None:
        link.use_nodes(nodes_of(link.process_group, device))
    table: ShardTable | None = None
    if options.shard_optimizer:
        from ddp_crossover.addons.shards.table import ShardTable, refuse_sharding

        refuse_sharding(link, device, plain_reason, ddp)
        table = ShardTable(named, optimizers, link)
    turns = None if lease is None else _turns(lease, ddp, link, fallbacks, moments)
    others: OtherJobs = NoOtherJobs() if turns is None else turns
    compute_waits = ComputeWaits(moments, others)
    if link.spins_on_device and (reason := why_streams_block()) is not None:
        fallbacks.note_here(reason)
    backend = dist.get_backend(link.process_group)
    has_choice = plain_reason is None and lease is None and options.leaves_the_choice
    bucket_cap_mb = bucket_cap_bytes(ddp) / MB if has_choice else None
    kinds = table.kinds() if table is not None else ()
    planning = Planning(named, options, wire, link, backend, others, bucket_cap_mb, kinds)
    planning.load_tuned()
    buckets = Buckets(ddp, parameters)
    memory: dict[str, Tensor] = {}
    codes: Codes = NO_CODES
    if plain_reason is None and planning.why_not_at_all() is None:
        memory = _memory(planning, named, link, wire, lands=table is not None)
        coded: Sequence[FusionBuffer] = ()
        if wire.has_codes:
            codes, coded = _codes(planning, memory, link, wire, device)
        # Lets it create what it would otherwise create at its first legs.
        link.connect(memory.values(), coded, exchanges_numbers=options.weighted or table is not None)
        planning.measure_link()
        buckets.make_small_at_attach(parameters)
    early_reads = EarlyReads()
    params = LazyParams(named)
    weights = RankWeights(link.rank, link.world_size)
    use_order = UseOrder(len(named))
    batches: WeightedBatches | None = None
    if options.weighted:
        from ddp_crossover.addons.weights.weighted_batches import WeightedBatches

        batches = WeightedBatches(ddp, link, weights, compute_waits, params, use_order)
        moments.follow(batches, inside=True)
    weighing: Weighing = EqualWeights() if batches is None else batches
    unreduced = UnreducedSteps(ddp, named, optimizers, fallbacks, link.world_size, weighing)
    of_updates = (optimizers, params, early_reads, fallbacks, unreduced)
    early_answers = _early_answers() if options.norms is Norms.SHARDED else None
    if table is None:
        updates = DeferredUpdates(*of_updates, strict=options.strict, early_answers=early_answers)
    else:
        from ddp_crossover.addons.shards.sharded_updates import ShardedUpdates

        updates = ShardedUpdates(
            *of_updates, strict=options.strict, early_answers=early_answers, table=table, link=link
        )
    in_force = PlanInForce(
        ddp,
        params,
        link,
        planning,
        updates,
        moments,
        compute_waits,
        weights=weights,
        weighing=weighing,
        use_order=use_order,
        buckets=buckets,
        memory=memory,
        wire=wire,
        codes=codes,
        plain_reason=plain_reason,
        owners=None if table is None else table.owners,
    )
    iterations = Iterations(link, early_reads, fallbacks)
    reducer = Reducer(
        moments,
        params,
        updates,
        in_force,
        weighing=weighing,
        unreduced=unreduced,
        iterations=iterations,
        on_leave=on_leave,
    )
    turn_points: TurnPoints | None = None
    if turns is not None:
        from ddp_crossover.addons.lease.sharing.turn_points import TurnPoints

        turn_points = TurnPoints(turns, updates)
        moments.follow(turn_points)
    if options.weighted and (warning := statistics_of_a_rank(ddp.module)) is not None and link.rank == 0:
        say(warning, logging.WARNING)
    return Parts(
        device=device,
        plain_reason=plain_reason,
        link=link,
        fallbacks=fallbacks,
        moments=moments,
        compute_waits=compute_waits,
        turns=turns,
        planning=planning,
        early_reads=early_reads,
        params=params,
        updates=updates,
        plan_in_force=in_force,
        reducer=reducer,
        iterations=iterations,
        batches=batches,
        turn_points=turn_points,
    )


def _memory(
    planning: Planning, named: Sequence[tuple[str, Parameter]], link: Link, wire: Wire, *, lands: bool
) -> dict[str, Tensor]:
    """Arenas that are large enough for every plan; made now, while there is room."""
    parameters = [parameter for _, parameter in named]
    memory = make_arenas(planning.plain_specs, parameters, link, wire.plain, lands=lands)
    if not wire.has_codes:
        return memory
    coded = make_arenas(planning.specs, parameters, link, wire, lands=lands)
    # A plan without codes has the same arena for more gradients than those that are not coded.
    return {
        name: max((each[name] for each in (memory, coded) if name in each), key=Tensor.numel)
        for name in memory | coded  # in one order on all ranks
    }


# What add-ons put into the ports of the core.


def _wire(options: Options, *, on_host: bool) -> Wire:
    if not options.has_codes:
        return Wire(options.wire_dtype)
    from ddp_crossover.addons.codes.wire import wire_of

    return wire_of(options.wire_dtype, options.compress, on_host=on_host)


def _codes(
    planning: Planning, memory: dict[str, Tensor], link: Link, wire: Wire, device: torch.device
) -> tuple[Codes, Sequence[FusionBuffer]]:
    """The codes, and buffers with which the link may connect."""
    from ddp_crossover.addons.codes.gradient_codes import GradientCodes, buffers_over
    from ddp_crossover.addons.codes.wire import CodedWire

    assert isinstance(wire, CodedWire)
    coded = () if link.codes_on_host else buffers_over(memory, planning.specs, link, wire)
    return GradientCodes(wire, planning.specs, link, device), coded


def _turns(
    lease: GpuLease, ddp: DistributedDataParallel, link: Link, fallbacks: FallbackLog, moments: Moments
) -> Turns:
    from ddp_crossover.addons.lease.sharing.lease_holder import WITHOUT_MPS, mps_runs
    from ddp_crossover.addons.lease.sharing.turn_points import why_turns_stand
    from ddp_crossover.addons.lease.sharing.turns import Turns

    if link.spins_on_device:
        if not mps_runs():
            fallbacks.note_here(WITHOUT_MPS)
        if (reason := why_turns_stand(ddp)) is not None:
            fallbacks.note_here(reason)
    return Turns(lease, link.clock, fallbacks.note_here, link.streams, moments.inside.waiting)


def _early_answers() -> EarlyAnswers:
    from ddp_crossover.addons.norms.stock_calls import answers_of_shards

    require_gradient_calls()
    return answers_of_shards
