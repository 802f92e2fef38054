"""DDP's side: the hook, and the state that one model and its optimizers share.

DDP calls :func:`dear_hook` once for every gradient bucket. The first backward passes are plain all-reduces, until DDP's
buckets have settled and two forwards have shown where each parameter is used. Then rank 0's plan is shared, and
the pipeline (``dear``) takes over.
"""
# No `from __future__ import annotations` here: DDP checks the annotations of hooks, and wants types.

import contextlib
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
from ddp_crossover.consensus import agree_on_plan, require_same_setup
from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.first_use import FirstUseAudit
from ddp_crossover.flush_points import FlushPoints
from ddp_crossover.fusion import DEFAULT_FUSION_MB, FusionPlan
from ddp_crossover.layouts import LayoutRecorder
from ddp_crossover.refusals import refuse_model, refuse_optimizers, refuse_options, why_plain_all_reduce
from ddp_crossover.separability import why_not_separable
from ddp_crossover.stats import DearStats, FallbackLog
from ddp_crossover.torch_internals import (
    GradBucket,
    call_after_backward,
    comm_hooks_of,
    managed_parameters,
    process_group_timeout,
)
from ddp_crossover.updates import DeferredUpdates
from ddp_crossover.wait_points import ForwardWatch, WaitPoints
from ddp_crossover.wire import scale_into, travels_as


class DearState:
    """Everything that one DDP model and its optimizers need; the first argument of ``register_comm_hook``.

    Args:
        ddp: the model.
        optimizer: its optimizer, or a list of all its optimizers.
        process_group: process group for our traffic, over the same ranks as ``ddp.process_group``. Default: a
            new one with the same backend and timeout, so that DDP's own traffic never queues behind ours.
        fusion_mb: target size of a fusion group on the wire, in MiB. Larger groups cost less latency, smaller
            ones overlap more finely. Default 8.
        schedule: ``"auto"`` or ``"dear"``: reduce-scatter in backward, all-gather in use order during the next
            forward. ``"allreduce"``: plain all-reduce in the hook, nothing deferred.
        wire_dtype: ``torch.bfloat16`` or ``torch.float16``: gradients of a wider dtype are cast to it, after the
            division by the world size, and cast back when they are used. Gloo adds 16-bit gradients up in fp32, in
            rank order, and rounds the sum once; NCCL adds in the wire dtype. Half the bytes of fp32, and not
            the parameters of plain fp32 DDP any more. float16 ends at 65504: use it with a loss scaler. Default:
            gradients travel as they are.
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
        strict: bool = False,
    ) -> None:
        refuse_model(ddp)
        refuse_options(schedule, fusion_mb, wire_dtype)
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        refuse_optimizers(ddp, optimizers)
        # Weak: the reducer, which is C++ and opaque to the garbage collector, holds this state.
        self._ddp = weakref.ref(ddp)
        self._process_group = ddp.process_group
        self._fusion_mb = DEFAULT_FUSION_MB if fusion_mb is None else fusion_mb
        self._wire_dtype = wire_dtype
        self._named = managed_parameters(ddp)
        self._every_parameter = list(ddp.parameters())
        self._device = self._named[0][1].device
        timeout = process_group_timeout(ddp.process_group, self._device)
        self._link: Link = make_link(
            ddp.process_group, self._device, timeout, own_group=process_group, sums_in_fp32=wire_dtype is not None
        )
        self._fallbacks = FallbackLog()
        self._plain_reason = why_plain_all_reduce(ddp, schedule)
        require_same_setup(self._link, self._named, optimizers, schedule, self._fusion_mb, wire_dtype)
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
        self._started_s: float | None = None
        # A model that is dropped without detach() must not leave threads and sockets behind.
        weakref.finalize(self, self._link.shut_down)

    # What users call.

    @property
    def plan(self) -> FusionPlan | None:
        """The fusion plan in force; None during the first iterations and with plain all-reduce."""
        return self._pipeline.plan if self._pipeline is not None else None

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
        clock = self._link.clock
        return DearStats(
            iterations=self._iterations,
            pipelined_iterations=self._pipelined_iterations,
            deferred_steps=self._updates.deferred_steps,
            elapsed_s=0.0 if self._started_s is None else time.perf_counter() - self._started_s,
            communication_s=clock.communication_s,
            exposed_s=clock.exposed_s,
            sent_bytes=self._link.sent_bytes,
            fallbacks=dict(self._fallbacks.counts),
        )

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
        future = self._plain_all_reduce(bucket) if self._pipeline is None else self._stage(bucket, parameters)
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
        self._replan_if_settled()
        if self._pipeline is not None:
            self._pipeline.begin_backward()
        self._link.next_iteration()
        call_after_backward(self._graph_task_ended)

    def _plain_all_reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        on_wire = buffer
        if (dtype := travels_as(buffer.dtype, self._wire_dtype)) is not buffer.dtype:
            on_wire = torch.empty_like(buffer, dtype=dtype)
        scale_into(on_wire, buffer, 1.0 / self._link.world_size)
        future = self._link.all_reduce(bucket.index(), on_wire)
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
        if self._started_s is None:
            self._started_s = time.perf_counter()
        if self._pipeline is not None:
            self._pipelined_iterations += 1
            self._pipeline.end_backward()
        elif self._plain_reason is not None:
            self._fallbacks.note(self._plain_reason)

    # The plan.

    def _replan_if_settled(self) -> None:
        if self._plain_reason is not None or not self._audit.done:
            return
        if not self._layouts.settled_anew():
            return
        self._updates.flush()
        if self._waits is not None:
            self._waits.remove()
        plan = agree_on_plan(
            self._named,
            self._layouts.arrival_order(),
            [self._audit.use_rank(index) for index in range(len(self._named))],
            self._link,
            self._fusion_mb,
            self._wire_dtype,
        )
        self._layouts.adopt()
        self._pipeline = Pipeline(
            plan,
            self._named,
            self._link,
            wire_dtype=self._wire_dtype,
            # With bucket views DDP hands out the reduced bucket even for what no rank has used.
            unwritten_is_unused=self._model.find_unused_parameters and not self._model.gradient_as_bucket_view,
        )
        self._updates.use(self._pipeline)
        self._waits = WaitPoints(self._model, self._pipeline, self._audit, lambda: self._watch.depth > 0)

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
        if self._waits is not None:
            self._waits.begin_forward()

    def _after_forward(self, returned: bool) -> None:
        if not self._audit.done:
            self._audit.end_forward(completed=returned)
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
