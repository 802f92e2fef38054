"""DDP's side: the hook, and the state that one model and its optimizers share.

DDP calls :func:`dear_hook` once for every gradient bucket. The first backward passes are plain all-reduces, until DDP's
buckets have settled and two forwards have shown where each parameter is used. Then rank 0's plan is shared, and
the pipeline (``dear``) takes over.
"""
# No `from __future__ import annotations` here: DDP checks the annotations of hooks, and wants types.

import contextlib
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover import shards
from ddp_crossover.collectives import Link, all_reduce_sum, make_link
from ddp_crossover.consensus import require_same_setup
from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.first_use import FirstUseAudit
from ddp_crossover.flush_points import FlushPoints
from ddp_crossover.fusion import FusionPlan, GradientSpec
from ddp_crossover.layouts import LayoutRecorder
from ddp_crossover.planning import Choice, Orders, Planning, PlanSettings
from ddp_crossover.profile_file import ModelProfile
from ddp_crossover.recording import recording
from ddp_crossover.refusals import refuse_model, refuse_optimizers, refuse_options, why_plain_all_reduce
from ddp_crossover.separability import why_not_separable
from ddp_crossover.stats import DearStats, FallbackLog, StepLog
from ddp_crossover.torch_internals import (
    GradBucket,
    bucket_cap_bytes,
    call_after_backward,
    comm_hooks_of,
    managed_parameters,
    process_group_timeout,
    rebuild_buckets,
)
from ddp_crossover.trace import Trace
from ddp_crossover.tuned_file import describe_model
from ddp_crossover.updates import DeferredUpdates
from ddp_crossover.wait_points import ForwardWatch, WaitPoints
from ddp_crossover.wire import scale_into, travels_as

# A hook call costs tens of microseconds: so fine that it does not show, so coarse that there are not too many.
_ARRIVAL_BYTES = 2**20
_MAX_BUCKETS = 256


class DearState:
    """Everything that one DDP model and its optimizers need; the first argument of ``register_comm_hook``.

    Args:
        ddp: the model.
        optimizer: its optimizer, or a list of all its optimizers.
        process_group: process group for our traffic, over the same ranks as ``ddp.process_group``. Default: a
            new one with the same backend and timeout, so that DDP's own traffic never queues behind ours.
        fusion_mb: size of a fusion group on the wire, in MiB. Larger groups cost less latency, smaller ones overlap
            more finely. Default: the one that is fastest, found from measured times and by trying.
        schedule: ``"auto"``: reduce-scatter in backward; all-gathers wherever the link would be idle, in
            backward and in the next forward. ``"dear"``: the paper's: all reduce-scatters, then all-gathers in
            use order. ``"allreduce"``: plain all-reduce in the hook, nothing deferred.
        wire_dtype: ``torch.bfloat16`` or ``torch.float16``: gradients of a wider dtype are cast to it, after the
            division by the world size, and cast back when they are used. Gloo adds 16-bit gradients up in fp32, in
            rank order, and rounds the sum once; NCCL adds in the wire dtype. Half the bytes of fp32, and not
            the parameters of plain fp32 DDP any more. float16 ends at 65504: use it with a loss scaler. Default:
            gradients travel as they are.
        tune: with ``schedule="auto"`` and no ``fusion_mb``: try group sizes, and plain all-reduce, on at most 60
            training steps (results stay exact), and keep the fastest. False: what the measured times predict.
        tuned_file: path of a JSON file where rank 0 keeps what was found, and finds it again in the next run.
        strict: debugging aid. Parameters that wait for an update hold NaN until it is applied, so that a
            read that nothing has intercepted cannot hide. Costs a copy of the parameters.

    Raises:
        TypeError, ValueError: for what cannot be trained exactly; the message names the way out.
        DisagreementError: if ranks were set up differently.

    Example::

        state = DearState(ddp, optimizer)
        ddp.register_comm_hook(state, dear_hook)
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        fusion_mb: float | None = None,
        schedule: str = "auto",
        wire_dtype: torch.dtype | None = None,
        tune: bool = True,
        tuned_file: str | os.PathLike[str] | None = None,
        strict: bool = False,
    ) -> None:
        refuse_model(ddp)
        refuse_options(schedule, fusion_mb, wire_dtype, tuned_file)
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        refuse_optimizers(ddp, optimizers)
        # Weak: the reducer, which is C++ and opaque to the garbage collector, holds this state.
        self._ddp = weakref.ref(ddp)
        self._process_group = ddp.process_group
        self._optimizers = optimizers
        self._wire_dtype = wire_dtype
        self._named = managed_parameters(ddp)
        self._index_of: dict[Tensor, int] = {p: index for index, (_, p) in enumerate(self._named)}
        self._every_parameter = list(ddp.parameters())
        self._device = self._named[0][1].device
        timeout = process_group_timeout(ddp.process_group, self._device)
        self._link: Link = make_link(
            ddp.process_group, self._device, timeout, own_group=process_group, sums_in_fp32=wire_dtype is not None
        )
        self._fallbacks = FallbackLog()
        self._plain_reason = why_plain_all_reduce(ddp, schedule)
        settings = PlanSettings(schedule, fusion_mb, tune, tuned_file)
        options = {
            "schedule": schedule,
            "fusion_mb": fusion_mb,
            "wire_dtype": str(wire_dtype),
            "tune": tune,
            "tuned_file": tuned_file is not None,
        }
        require_same_setup(self._link, self._named, optimizers, options)
        key = describe_model(
            self._named,
            world_size=self._link.world_size,
            backend=dist.get_backend(ddp.process_group),
            device_type=self._device.type,
            wire_dtype=None if wire_dtype is None else str(wire_dtype),
        )
        specs = [_gradient_spec(name, parameter, wire_dtype) for name, parameter in self._named]
        self._planning = Planning(specs, settings, self._link, self._device, key)
        self._is_plain = True
        if self._plain_reason is None:
            _let_gradients_arrive_early(ddp, self._named)
        self._updates = DeferredUpdates(
            [(one, why_not_separable(one)) for one in optimizers], self._fallbacks, strict=strict
        )
        self._pipeline: Pipeline | None = None
        self._waits: WaitPoints | None = None
        self._layouts = LayoutRecorder([parameter for _, parameter in self._named])
        self._audit = FirstUseAudit(ddp.module, [parameter for _, parameter in self._named])
        self._watch = ForwardWatch(ddp, self._before_forward, self._after_forward)
        self._flush_points = FlushPoints(ddp, self.synchronize, self._flush_for_reader)
        self._in_backward = False
        self._last_bucket = -1
        self._seen_forward = False
        self._detached = False
        self._iterations = self._pipelined_iterations = 0
        self._steps = StepLog()
        self._last_bucket_s = 0.0
        # A model that is dropped without detach() must not leave threads and sockets behind.
        weakref.finalize(self, self._link.shut_down)

    # What users call.

    @property
    def plan(self) -> FusionPlan | None:
        """The fusion plan in force; None during the first iterations and with plain all-reduce."""
        return self._pipeline.plan if self._pipeline is not None and not self._is_plain else None

    @property
    def tuning(self) -> bool:
        """Whether the plan is still going to change: times are being measured, or plans tried."""
        return self._plain_reason is None and (self._pipeline is None or not self._planning.settled)

    def tuning_progress(self) -> str:
        """One line on what has been measured, tried and found so far."""
        return self._plain_reason or self._planning.progress()

    def profile(self) -> ModelProfile | None:
        """Measured compute times and link, for ``python -m ddp_crossover simulate``; None before they are known."""
        return self._planning.model_profile()

    def synchronize(self) -> None:
        """Apply all pending updates now.

        Needed only before parameters are read in a way that nothing can intercept, such as ``p.data`` of a
        parameter that was put aside earlier. Forwards, ``state_dict()``, ``parameters()`` and copies of
        the model do it by themselves.
        """
        self._updates.flush()

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Within it nothing is pending: parameters may be read and written in any way."""
        self.synchronize()
        before, self._updates.enabled = self._updates.enabled, False
        try:
            yield
        finally:
            self._updates.enabled = before
            self.synchronize()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients of the model, as ``torch.nn.utils.clip_grad_norm_`` does.

        Every rank must call it: each gives the norm of its shards; the factor is applied when gradients are used.
        The stock function does the work in the first iterations, and with parameters that DDP ignores.

        Args:
            max_norm: norm to clip to.
            norm_type: p of the p-norm, may be ``inf``.

        Returns:
            The norm before clipping: 0-dim, on the parameters' device, fp32 (fp64 with fp64 gradients).
        """
        pipeline = self._pipeline
        if pipeline is not None and pipeline.phase is Phase.REDUCED and norm_type > 0:
            gradients = shards.gradients_of(pipeline, self._every_parameter)
            if gradients is not None:
                norm = shards.total_norm(pipeline, gradients, float(norm_type))
                shards.scale(gradients, torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
                return norm
        return torch.nn.utils.clip_grad_norm_(self._every_parameter, max_norm, norm_type)

    def stats(self) -> DearStats:
        """Figures of this rank since attach."""
        sums = self._link.clock.sums()
        return DearStats(
            iterations=self._iterations,
            pipelined_iterations=self._pipelined_iterations,
            deferred_steps=self._updates.deferred_steps,
            elapsed_s=self._steps.elapsed_s(),
            communication_s=sums.communication_s,
            exposed_s=sums.exposed_s,
            sent_bytes=self._link.sent_bytes,
            fallbacks=dict(self._fallbacks.counts),
            last_steps=self._steps.figures(),
        )

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record every forward, backward, leg, wait and update of this rank within it, see :class:`Trace`.

        Any rank may do it alone. It costs nothing while nobody traces.

        Raises:
            RuntimeError: if another trace is being taken.
        """
        trace = Trace(self._link.rank, "DeAR", self._device)
        with recording(trace, self._link.clock, self._model, self._optimizers):
            yield trace

    def detach(self) -> None:
        """Apply what is pending and remove every hook; the script goes on as plain DDP."""
        if self._detached:
            return
        self._detached = True
        if self._pipeline is not None:
            self._pipeline.retire()
            self._pipeline.unwrap_gradients()
        if self._waits is not None:
            self._waits.remove()
        self._audit.end_forward(completed=False)
        for part in (self._updates, self._watch, self._flush_points):
            part.remove()
        self._link.close()

    def __deepcopy__(self, memo: dict) -> NoReturn:  # type: ignore[type-arg]
        raise TypeError("a DearState belongs to one model: copy ddp.module, and attach to the copy")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a DearState cannot be pickled: save state_dict() of model and optimizer")

    @property
    def _model(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None  # it is running
        return ddp

    # DDP's backward.

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The work of :func:`dear_hook`."""
        if self._detached:
            # As DDP does without a hook, which cannot be taken out of it again.
            return all_reduce_sum(bucket.buffer().mul_(1.0 / self._link.world_size), self._process_group)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "dear_hook cannot be captured in a CUDA graph, because its step spans two iterations: "
                "capture without the hook, or call state.detach() first"
            )
        # An index that comes again means that the backward before this one broke off.
        if not self._in_backward or bucket.index() <= self._last_bucket:
            self._begin_backward()
        self._last_bucket = bucket.index()
        parameters = bucket.parameters()
        self._layouts.record(bucket.index(), parameters)
        if self._planning.profiler is not None:
            self._planning.profiler.arrived(map(self._index_of.__getitem__, parameters))
        future = self._plain_all_reduce(bucket) if self._is_plain else self._stage(bucket, parameters)
        if self._layouts.complete:
            # Once more, for the graph task of the last bucket: reentrant checkpointing has several.
            call_after_backward(self._graph_task_ended)
        elif bucket.is_last() and not self._may_skip_buckets():
            names = ", ".join(self._named[index][0] for index in self._layouts.missing())
            raise RuntimeError(
                f"DDP does not reduce {names}, which did not require a gradient when it was built: freeze and unfreeze "
                "parameters before building DistributedDataParallel, then attach"
            )
        return future

    def _may_skip_buckets(self) -> bool:
        return bool(getattr(self._model, "skip_all_reduce_unused_params", False))

    def _begin_backward(self) -> None:
        if self._pipeline is not None:
            self._pipeline.retire()
        self._in_backward = True
        self._layouts.begin_backward()
        self._choose_plan()
        self._link.next_iteration()
        if self._pipeline is not None and not self._is_plain:
            self._pipeline.begin_backward()
        call_after_backward(self._graph_task_ended)

    def _plain_all_reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        on_wire = buffer
        if (dtype := travels_as(buffer.dtype, self._wire_dtype)) is not buffer.dtype:
            on_wire = torch.empty_like(buffer, dtype=dtype)
        scale_into(on_wire, buffer, 1.0 / self._link.world_size)
        future = self._link.all_reduce(bucket.index(), on_wire)
        self._last_bucket_s = time.perf_counter()
        return future if on_wire is buffer else future.then(lambda summed: buffer.copy_(summed.value()))

    def _stage(self, bucket: GradBucket, parameters: list[Tensor]) -> torch.futures.Future[Tensor]:
        assert self._pipeline is not None
        buffer = bucket.buffer()
        self._pipeline.stage(bucket.index(), buffer, parameters, bucket.gradients)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        # Complete at once: backward waits for nothing, and DDP believes that it is done.
        future.set_result(buffer)
        return future

    def _graph_task_ended(self) -> None:
        # DDP's own callback is queued behind this one, and copies buckets into gradients.
        call_after_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        if not self._in_backward or not (self._layouts.complete or self._may_skip_buckets()):
            return
        self._in_backward = False
        self._layouts.end_backward()
        self._iterations += 1
        if self._is_plain and self._device.type == "cpu":
            self._link.clock.waited(self._last_bucket_s, "all-reduces")  # in DDP's own callback
        if self._planning.profiler is not None:
            self._planning.profiler.backward_ends()
        if self._pipeline is not None and not self._is_plain:
            self._pipelined_iterations += 1
            self._pipeline.end_backward()
        elif self._plain_reason is not None:
            self._fallbacks.note(self._plain_reason)
        self._steps.note(self._link.clock.sums(), self._link.sent_bytes, self._fallbacks.counts)

    # The plan.

    def _choose_plan(self) -> None:
        if self._plain_reason is not None or not self._audit.done:
            return
        if self._layouts.settled_anew():
            use_rank = [self._audit.use_rank(index) for index in range(len(self._named))]
            self._use(self._planning.begin(Orders(self._layouts.arrival_order(), use_rank)))
            self._layouts.adopt()
        elif self._pipeline is not None and (choice := self._planning.at_step_boundary()) is not None:
            self._use(choice)

    def _use(self, choice: Choice) -> None:
        """Switch between two iterations: nothing is pending, nothing on the wire."""
        self._updates.flush()
        if self._waits is not None:
            self._waits.remove()
        self._link.forget_sizes()
        before = self._pipeline
        self._is_plain = choice.is_plain
        self._pipeline = Pipeline(
            choice.plan,
            self._named,
            self._link,
            memory=before.release() if before is not None else {},
            wire_dtype=self._wire_dtype,
            every_group_arrives=not self._may_skip_buckets(),
            # With bucket views DDP hands out the reduced bucket even for what no rank has used.
            unwritten_is_unused=self._model.find_unused_parameters and not self._model.gradient_as_bucket_view,
        )
        self._updates.use(self._pipeline)
        self._waits = WaitPoints(
            self._model, self._pipeline, self._audit, lambda: self._watch.depth > 0, self._planning.profiler
        )

    # Forwards, and other readers.

    def _before_forward(self) -> None:
        if not self._seen_forward:
            self._seen_forward = True
            if not any(state is self for _, state in comm_hooks_of(self._model)):
                self._fallbacks.note(
                    "a DearState was built but its hook is not registered: call "
                    "ddp.register_comm_hook(state, dear_hook), or use attach(ddp, optimizer)"
                )
        if not self._audit.done:
            self._audit.begin_forward()
        if self._planning.profiler is not None:
            self._planning.profiler.forward_begins()
        if self._waits is not None:
            self._waits.begin_forward()

    def _after_forward(self, returned: bool) -> None:
        if not self._audit.done:
            self._audit.end_forward(completed=returned)
        if self._planning.profiler is not None:
            self._planning.profiler.forward_ends()
        if self._waits is not None:
            self._waits.end_forward()

    def _flush_for_reader(self) -> None:
        if self._pipeline is None or not self._pipeline.has_updates:
            return
        if not self._watch.depth:  # within a forward it is dynamo that asks, while it compiles
            self._fallbacks.note(
                "parameters() was called between optimizer.step() and the next forward: all updates were waited "
                "for. Put aside list(ddp.parameters()) before the loop if only gradients are looked at"
            )
        self.synchronize()


def _let_gradients_arrive_early(ddp: DistributedDataParallel, named: list[tuple[str, torch.nn.Parameter]]) -> None:
    """Smaller DDP buckets: a gradient is in the hook's hands only when its whole bucket is complete.

    What travels together is the planner's choice, so DDP's 25 MiB would only cost overlap.
    """
    total_bytes = sum(parameter.nbytes for _, parameter in named)
    cap_bytes = max(_ARRIVAL_BYTES, total_bytes // _MAX_BUCKETS)
    if cap_bytes < bucket_cap_bytes(ddp):
        rebuild_buckets(ddp, cap_bytes)


def _gradient_spec(name: str, parameter: torch.nn.Parameter, wire_dtype: torch.dtype | None) -> GradientSpec:
    dtype = travels_as(parameter.dtype, wire_dtype)
    as_what = "" if dtype is parameter.dtype else f" as {dtype}"
    arena = f"{parameter.dtype}{as_what} on {parameter.device.type}".replace("torch.", "")
    return GradientSpec(name, parameter.numel(), dtype.itemsize, arena)


def dear_hook(state: DearState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: reduce-scatter now, all-gather during the next forward.

    Use it as ``ddp.register_comm_hook(state, dear_hook)`` with a :class:`DearState`. Trains exactly as DDP does.
    Source: DeAR, arXiv 2302.12445.
    """
    return state.reduce(bucket)


def attach(ddp: DistributedDataParallel, optimizer: Optimizer | Sequence[Optimizer], **options: object) -> DearState:
    """Build a :class:`DearState` and register :func:`dear_hook` in one go; ``options`` are its keywords."""
    state = DearState(ddp, optimizer, **options)  # type: ignore[arg-type]
    ddp.register_comm_hook(state, dear_hook)
    return state
