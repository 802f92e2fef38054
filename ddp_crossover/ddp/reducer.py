"""Reduces DDP's buckets: with plain all-reduces at first, then in the pipeline, under the plan in force.

Follows DDP from forward to forward: learns the layout of its buckets and the use order of parameters, asks ``planning``
for a plan and switches plans between iterations. Knows DDP's hook contract; users hold a ``comm_hook.DearState``.
"""
# No `from __future__ import annotations`: DDP checks the annotations of what it calls, and expects types.

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.collectives.all_reduce import all_reduce_sum, wait_for_futures
from ddp_crossover.collectives.link import Link
from ddp_crossover.collectives.wire import scale_into, travels_as
from ddp_crossover.ddp.bucket_layout import LayoutRecorder
from ddp_crossover.ddp.forwards import CompiledCode, ForwardWatch
from ddp_crossover.ddp.refused_methods import allow_methods, refuse_methods
from ddp_crossover.ddp.use_order import UseOrder
from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.gpu_sharing.turns import Turns
from ddp_crossover.optim.deferred_updates import DeferredUpdates
from ddp_crossover.parameters.early_reads import Looks
from ddp_crossover.parameters.kept_gradients import KeptGradients
from ddp_crossover.parameters.lazy_params import LazyParam, LazyParams, StaleParameterError, StaleReadGuard
from ddp_crossover.planning.session import Choice, Orders, Planning
from ddp_crossover.stats import FallbackLog, StepLog
from ddp_crossover.torch_internals import (
    GradBucket,
    bucket_cap_bytes,
    call_after_backward,
    comm_hooks_of,
    forget_comm_hooks,
    has_run_forward,
    rebuild_buckets,
)

# Size of DDP's buckets: small enough that gradients reach the hook early, and not too many of them, because each hook
# call costs tens of microseconds.
_ARRIVAL_BYTES = 2**20
_MAX_BUCKETS = 256


class Reducer:
    """Reduces the gradients of one DDP model.

    Args:
        ddp: the model.
        named: the parameters that DDP manages, with their names.
        params: the same parameters, with their pending updates.
        looks: records which code needs updates or gradients early.
        link: runs the legs.
        planning: makes the plans.
        updates: defers the optimizers' updates.
        fallbacks: records what took a slower path.
        turns: notified when compute begins, waits and ends.
        on_first_forward: called when the first forward begins, or None.
        memory: arenas for the first pipeline, large enough for every plan.
        wire_dtype: dtype to which wider gradients are cast on the wire, or None.
        plain_reason: why every bucket goes through a plain all-reduce, or None.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        params: LazyParams,
        looks: Looks,
        link: Link,
        planning: Planning,
        updates: DeferredUpdates,
        fallbacks: FallbackLog,
        turns: Turns,
        *,
        on_first_forward: Callable[[], None] | None,
        memory: Mapping[str, Tensor],
        wire_dtype: torch.dtype | None,
        plain_reason: str | None,
    ) -> None:
        # Weak: DDP's C++ reducer, which is opaque to the garbage collector, holds this object.
        self._ddp = weakref.ref(ddp)
        self._process_group = ddp.process_group
        self._named = named
        self._index_of: dict[Tensor, int] = {p: index for index, (_, p) in enumerate(named)}
        self._strides = _strides(self._index_of)
        self._device = named[0][1].device
        self._link = link
        self._planning = planning
        self._updates = updates
        self._fallbacks = fallbacks
        self._turns = turns
        self._memory = memory
        self._wire_dtype = wire_dtype
        self._plain_reason = plain_reason
        self.pipeline: Pipeline | None = None
        self.is_plain = True
        self.iterations = self.pipelined_iterations = 0
        self.steps = StepLog()
        self._params = params
        self._looks = looks
        self._kept = KeptGradients()
        self._layouts = LayoutRecorder([parameter for _, parameter in named])
        self._use_order = UseOrder(len(named))
        self._guard = StaleReadGuard(params, self._stale_read)
        self._watch = ForwardWatch(ddp, self._before_forward, self._after_forward)
        self._compiled = CompiledCode(ddp.module, params, looks, fallbacks, self.finish_gradients)
        params.on_use = self._guard.note_touch
        refuse_methods(ddp)
        self._in_backward = False
        self._last_bucket = -1
        self._last_bucket_s = 0.0
        self._plain_under_way: list[torch.futures.Future[Tensor]] = []
        self._on_first_forward = on_first_forward
        self._seen_forward = False
        self._awaits_backward = False
        self._detached = False

    @property
    def model(self) -> DistributedDataParallel:
        """The DDP model."""
        ddp = self._ddp()
        assert ddp is not None  # the model is running
        return ddp

    def detach(self) -> None:
        """Apply pending updates, deliver pending gradients, and remove all hooks."""
        self._detached = True
        was_registered = self._is_registered()
        try:
            if self.pipeline is not None:
                self.pipeline.retire()
                self.pipeline.unwrap_gradients()
            self._params.use_all()
        finally:
            self.become_plain()
        # Give DDP a new reducer without a hook. Not between a forward and its backward: the new reducer would not
        # reduce the gradients of a forward that the old reducer has prepared.
        if was_registered and not (self._awaits_backward or self._in_backward):
            rebuild_buckets(self.model)
        # Drop references now: this object is part of reference cycles, which may be collected only many models later,
        # and updates of a network that is attached again are deferred only if nothing else refers to its memory.
        if self.pipeline is not None:
            self.pipeline.let_go()
        self._params.let_go()
        self._named, self._memory = (), {}
        self._index_of.clear()
        del self._compiled

    def finish_gradients(self) -> bool:
        """Wait for all pending gradients and put them into ``.grad``; returns whether any was pending."""
        return self.pipeline is not None and self.pipeline.phase is Phase.REDUCED and self.pipeline.unwrap_gradients()

    def become_plain(self) -> None:
        """Remove all hooks; nothing is deferred from now on."""
        self._detached = True
        for part in (self._updates, self._watch, self._guard, self._compiled):
            part.remove()
        if (ddp := self._ddp()) is not None:
            allow_methods(ddp)
            if self._is_registered():
                forget_comm_hooks(ddp)

    # DDP's backward.

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce one bucket now, or stage it in the pipeline; the implementation of :func:`dear_hook`.

        Returns:
            A future of the bucket's flat gradients; in the pipeline complete at once, with this rank's own gradients.

        Raises:
            RuntimeError: if the hook runs after ``detach()`` while still registered, or in a CUDA graph capture; if
                the memory layout of a parameter has changed; if DDP's parameters are not those seen at attach.
        """
        if self._detached:
            if self._is_registered():
                raise RuntimeError(
                    "this DearState was detached and cannot be used again: attach(ddp, optimizer) makes a new one"
                )
            # The forward of this backward ran before detach(): all-reduce as DDP does without a hook.
            buffer = bucket.buffer().detach().mul_(1.0 / self._link.world_size)
            return all_reduce_sum(buffer, self._process_group, stream=self._link.all_reduce_stream)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "dear_hook cannot be captured in a CUDA graph, because its step spans two iterations: "
                "capture without the hook, or call state.detach() first"
            )
        # A bucket index that repeats or decreases means that the previous backward raised.
        if not self._in_backward or bucket.index() <= self._last_bucket:
            self._begin_backward()
        self._last_bucket = bucket.index()
        parameters = bucket.parameters()
        self._layouts.record(bucket.index(), parameters)
        if self._planning.profiler is not None:
            self._planning.profiler.arrived(map(self._index_of.__getitem__, parameters))
        future = self._plain_all_reduce(bucket) if self.is_plain else self._stage(bucket, parameters)
        if self._layouts.complete:
            # Queue again, for the graph task of the last bucket: reentrant checkpointing runs several graph tasks.
            call_after_backward(self._graph_task_ended)
        elif bucket.is_last() and not self._may_skip_buckets():
            names = ", ".join(self._named[index][0] for index in self._layouts.missing())
            raise RuntimeError(
                f"DDP does not reduce {names}, which did not require a gradient when it was built: freeze and unfreeze "
                "parameters before building DistributedDataParallel, then attach"
            )
        return future

    def _refuse_new_layout(self) -> None:
        """Raise if the memory layout of a parameter has changed since attach.

        DDP's buckets keep the old layout, so even plain DDP gets most of such gradients wrong.
        """
        if self._plain_reason is not None or (strides := _strides(self._index_of)) == self._strides:
            return
        for (name, parameter), before, now in zip(self._named, self._strides, strides, strict=True):
            if any(size > 1 and a != b for size, a, b in zip(parameter.shape, before, now, strict=True)):
                raise RuntimeError(
                    f"the memory layout of {name} has changed since attach (memory_format=torch.channels_last and the "
                    "like), and DDP's buckets have not: change it before building DistributedDataParallel, or call "
                    "state.detach(), build a new DistributedDataParallel around ddp.module, and attach to that"
                )
        self._strides = strides

    def _may_skip_buckets(self) -> bool:
        return bool(getattr(self.model, "skip_all_reduce_unused_params", False))

    def _begin_backward(self) -> None:
        for future in self._plain_under_way:  # left by a backward that raised, and still writing into DDP's buckets
            future.wait()
        self._plain_under_way.clear()
        if self.pipeline is not None:
            self.pipeline.retire()
        self._refuse_new_layout()
        self._in_backward = True
        self._awaits_backward = False
        self._layouts.begin_backward()
        self._choose_plan()
        self._link.begin_iteration()
        if self.pipeline is not None and not self.is_plain:
            self.pipeline.begin_backward()
        self._turns.want()
        self._turns.resume()
        call_after_backward(self._graph_task_ended)

    def _plain_all_reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().detach()  # only values are sent, even under backward(create_graph=True)
        on_wire = buffer
        if (dtype := travels_as(buffer.dtype, self._wire_dtype)) is not buffer.dtype:
            on_wire = torch.empty_like(buffer, dtype=dtype)
        scale_into(on_wire, buffer, 1.0 / self._link.world_size)
        future = self._link.all_reduce(bucket.index(), on_wire)
        self._plain_under_way.append(future)
        self._last_bucket_s = time.perf_counter()
        return future if on_wire is buffer else future.then(lambda summed: buffer.copy_(summed.value()))

    def _stage(self, bucket: GradBucket, parameters: list[Tensor]) -> torch.futures.Future[Tensor]:
        assert self.pipeline is not None
        buffer = bucket.buffer().detach()
        self.pipeline.stage(bucket.index(), buffer, parameters, bucket.gradients)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        # Complete at once: DDP takes the bucket for reduced, and backward does not wait.
        future.set_result(buffer)
        return future

    def _graph_task_ended(self) -> None:
        if self._layouts.complete:
            if self._plain_under_way and self._device.type == "cpu":
                self._wait_for_all_reduces()
            elif self.is_plain or self.model.find_unused_parameters:
                self._turns.release()  # DDP waits for other ranks next
        # Queue again, to run after DDP's own callback, which copies buckets into gradients.
        call_after_backward(self._backward_ended)

    def _wait_for_all_reduces(self) -> None:
        """Wait for the all-reduces here: DDP's C++ wait would block while holding the lease."""
        with self._turns.gap("all-reduces") as host_wait:
            if host_wait is None:
                return
            wait_for_futures(self._plain_under_way, host_wait)
            # Release the lease: `step()` takes its own turn, and the script may first load another micro-batch.
            self._turns.release()
            self._link.clock.waited(self._last_bucket_s, "all-reduces")
        self._plain_under_way.clear()
        self._last_bucket_s = time.perf_counter()

    def _backward_ended(self) -> None:
        if not self._in_backward or not (self._layouts.complete or self._may_skip_buckets()):
            return
        self._in_backward = False
        self._plain_under_way.clear()
        self._layouts.end_backward()
        self.iterations += 1
        if self.is_plain and self._device.type == "cpu":
            self._link.clock.waited(self._last_bucket_s, "all-reduces")  # DDP's own callback has waited
        if self._planning.profiler is not None:
            self._planning.profiler.backward_ends()
        if self.pipeline is not None and not self.is_plain:
            self.pipelined_iterations += 1
            self.pipeline.end_backward()
            if self._compiled.needs_gradients:
                self.finish_gradients()
        elif (reason := self._why_plain()) is not None:
            self._fallbacks.note(reason)
        self._turns.release()
        self._turns.step_ended()
        self.steps.note(
            self._link.clock.sums(),
            self._link.sent_bytes,
            self._fallbacks.counts,
            is_pipelined=not self.is_plain,
            was_looked_at=self._looks.is_explained,
        )
        self._looks.next_step()

    # The plan.

    def _choose_plan(self) -> None:
        if self._plain_reason is not None or not self._use_order.is_known:
            return
        if self._layouts.settled_anew():
            with self._turns.released():
                choice = self._planning.begin(Orders(self._layouts.arrival_order(), self._use_order.ranks()))
            self._use(choice)
            self._layouts.adopt()
        elif self.pipeline is not None and (change := self._planning.at_step_boundary()) is not None:
            self._use(change)

    def _use(self, choice: Choice) -> None:
        """Switch plans. Called between iterations, when no update is pending and no leg is under way."""
        before = self.pipeline
        self.is_plain = choice.is_plain
        self.pipeline = Pipeline(
            choice.plan,
            self._named,
            self._link,
            self._turns,
            self._kept,
            lock=self._params.lock,
            memory=before.release() if before is not None else self._memory,
            wire_dtype=self._wire_dtype,
            every_group_arrives=not self._may_skip_buckets(),
            # With gradient_as_bucket_view, DDP sets `.grad` to a view of the bucket even if no rank used the parameter.
            unwritten_is_unused=self.model.find_unused_parameters and not self.model.gradient_as_bucket_view,
        )
        self._turns.profiler = self._planning.profiler
        self._updates.use(self.pipeline, is_plain=choice.is_plain)

    def _why_plain(self) -> str | None:
        if self.pipeline is not None and self._planning.settled:
            return "plain all-reduce in the hook was faster than every pipeline that was tried: nothing is deferred"
        return self._plain_reason

    # Forwards, and other readers of parameters.

    def _is_registered(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and any(getattr(state, "_reducer", None) is self for _, state in comm_hooks_of(ddp))

    def _before_forward(self) -> None:
        if not self._seen_forward:
            self._seen_forward = True
            if self._on_first_forward is not None:
                self._on_first_forward()
            if not self._is_registered():
                self._fallbacks.note(
                    "a DearState was built but its hook is not registered: call "
                    "ddp.register_comm_hook(state, dear_hook), or use attach(ddp, optimizer)"
                )
        self._guard.remove()
        if not torch.is_grad_enabled():
            # Code that runs without gradients may check a parameter's class, as TransformerEncoder's fast path does.
            self._updates.flush()
            return
        self._updates.refuse_to_go_on()
        if self._planning.profiler is not None:
            self._planning.profiler.forward_begins()
        if self._plain_reason is None and self.pipeline is None:
            self._params.arm_all()  # no update is pending yet: arm parameters only to learn the use order
        note_use = self._use_order.begin_forward()
        self._params.on_use = note_use if self._planning.profiler is None else self._timing(note_use)
        self._looks.is_inside_forward = True
        self._compiled.before_forward()

    def _after_forward(self, returned: bool) -> None:
        self._looks.is_inside_forward = False
        self._params.on_use = self._guard.note_touch
        if not torch.is_grad_enabled():
            return
        self._awaits_backward = self.model.require_backward_grad_sync
        if self._planning.profiler is not None:
            self._planning.profiler.forward_ends()
        if returned and self._use_order.end_forward() and self.pipeline is not None:
            self.pipeline.follow(self._use_order.ranks())
        self._guard.end_forward()
        # Protects gradients that are still being staged: the next backward writes into DDP's buckets before it calls
        # the hook.
        self._link.finish_staging()

    def _timing(self, note_use: Callable[[LazyParam], None]) -> Callable[[LazyParam], None]:
        profiler = self._planning.profiler
        assert profiler is not None

        def note(lazy: LazyParam) -> None:
            note_use(lazy)
            profiler.used((lazy.index,))

        return note

    def _stale_read(self, lazy: LazyParam) -> None:
        """Handle a gradient that arrives for a parameter which this forward has not touched."""
        if self.pipeline is None:
            # No update was pending yet, so this read was right; never defer updates of this parameter.
            lazy.why_never_lazy = "is read in forward where torch does not tell, as by TorchScript or an extension"
            return
        raise StaleParameterError(
            f"{lazy.name} was used by this forward in a way that torch does not tell of (as by TorchScript or an "
            "extension) and that no earlier forward has shown, so perhaps before its update was applied. Call "
            "state.synchronize() before such a forward, or attach with schedule='allreduce'"
        )


def _strides(parameters: Iterable[Tensor]) -> list[tuple[int, ...]]:
    with torch._C.DisableTorchFunctionSubclass():  # strides need no value, so do not touch the parameters
        return list(map(Tensor.stride, parameters))


def let_gradients_arrive_early(
    ddp: DistributedDataParallel, named: Sequence[tuple[str, torch.nn.Parameter]]
) -> Callable[[], None] | None:
    """Give DDP smaller buckets, because a gradient reaches the hook only when its whole bucket is complete.

    The planner decides which gradients travel together, so DDP's buckets of 25 MiB would only cost overlap.

    Returns:
        A callback for the beginning of the next forward: until then, backward is refused. None if it is not refused.
    """
    total_bytes = sum(parameter.nbytes for _, parameter in named)
    cap_bytes = max(_ARRIVAL_BYTES, total_bytes // _MAX_BUCKETS)
    if cap_bytes < bucket_cap_bytes(ddp):
        rebuild_buckets(ddp, cap_bytes)
        if not has_run_forward(ddp):
            return None
        return _refuse_backward_of_earlier_forward(ddp, [parameter for _, parameter in named])
    return None


def _refuse_backward_of_earlier_forward(
    ddp: DistributedDataParallel, parameters: Sequence[Tensor]
) -> Callable[[], None]:
    """Refuse the backward of an earlier forward, because DDP's new reducer would not reduce its gradients.

    Returns:
        A callback that allows backward again.
    """

    def refuse(gradient: Tensor) -> NoReturn:
        raise RuntimeError(
            "dear_hook was attached between a forward and its backward, whose gradients DDP would not reduce: "
            "attach before the forward"
        )

    def allow(*_: object) -> None:
        for handle in handles:
            handle.remove()

    handles = [parameter.register_hook(refuse) for parameter in parameters]
    handles.append(ddp.register_forward_pre_hook(torch.compiler.disable(allow)))  # also works after detach()
    return allow
