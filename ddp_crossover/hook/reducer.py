"""Follows DDP from forward to forward and from bucket to bucket, and tells all others where an iteration is.

Knows DDP's hook contract. What reduces the buckets is another object (``plan_in_force``); users hold a
``comm_hook.DearState``.

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""
# No `from __future__ import annotations`: DDP checks the annotations of what it calls, and expects types.

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover import device as gpu
from ddp_crossover.hook.buckets import MemoryFormats, may_skip_buckets
from ddp_crossover.hook.forwards import CompiledCode
from ddp_crossover.hook.iterations import Iterations
from ddp_crossover.hook.plan_in_force import PlanInForce
from ddp_crossover.hook.refusals import allow_methods, refuse_methods
from ddp_crossover.hook.unreduced_steps import UnreducedSteps
from ddp_crossover.hook.weighing import Weighing
from ddp_crossover.moments import Moments, call_before_backward
from ddp_crossover.pending.lazy_param import LazyParam, StaleParameterError
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.pending.reduced_gradients import unwrap_gradients
from ddp_crossover.pending.stale_reads import StaleReadGuard
from ddp_crossover.step.deferred_updates import DeferredUpdates
from ddp_crossover.torch_internals.autograd import call_after_backward
from ddp_crossover.torch_internals.ddp import GradBucket, comm_hooks_of, forget_comm_hooks, rebuild_buckets


class HookState:
    """What is registered with DDP beside the hook: it has a reducer, which finds itself among DDP's hooks by it."""

    _reducer: "Reducer"

    def reduces_with(self, reducer: "Reducer") -> bool:
        """Whether this is the state of ``reducer``."""
        return self._reducer is reducer


_PAST_FORWARD = (
    "the model is never called itself, as if a subclass of DDP had a train_step() of its own, so there are only plain "
    "all-reduces and nothing is deferred",
    "Call ddp(...), which may do something else than forward() in _run_ddp_forward()",
)


class Reducer:
    """Reduces the gradients of one DDP model.

    Args:
        moments: hears of the model's forwards.
        params: the parameters that DDP manages, with their pending updates.
        updates: defers the optimizers' updates.
        in_force: what reduces the buckets.
        weighing: says what the gradients of each rank weigh.
        unreduced: finds steps whose gradients were not reduced.
        iterations: the record of what was trained.
        on_leave: called when DDP should be left alone, with a sentence that says why. It has to detach.

    Attributes:
        is_detached: whether DDP trains as it was before attach.
    """

    def __init__(
        self,
        moments: Moments,
        params: LazyParams,
        updates: DeferredUpdates,
        in_force: PlanInForce,
        *,
        weighing: Weighing,
        unreduced: UnreducedSteps,
        iterations: Iterations,
        on_leave: Callable[[str], None],
    ) -> None:
        self._in_force = in_force
        self._moments = moments
        ddp = moments.model
        self._memory_formats = MemoryFormats(params.all)
        self._device = params.all[0].parameter.device
        self._updates = updates
        self._on_leave = on_leave
        self._iterations = iterations
        self._params = params
        self._layouts = in_force.layouts
        self._guard = StaleReadGuard(params, self._stale_read)
        self._watch = moments.watch_forwards(self._before_forward, self._after_forward)
        self._compiled = CompiledCode(
            ddp.module, params, iterations.early_reads, iterations.fallbacks, in_force.finish_local_gradients
        )
        params.watch_uses(self._guard.note_touch, see_all=False)
        refuse_methods(ddp)
        self._weighing = weighing
        self._unreduced = unreduced
        self._in_backward = False
        self._last_bucket = -1
        self._seen_forward = self._had_begun = False
        self._awaits_backward = False
        self.is_detached = False

    @property
    def model(self) -> DistributedDataParallel:
        """The model. Raises RuntimeError if it is gone."""
        return self._moments.model

    def detach(self) -> None:
        """Apply pending updates, deliver pending gradients, and remove all hooks."""
        self.is_detached = True
        was_registered = self._is_registered()
        if self._awaits_backward:
            self._weighing.end()
        try:
            if (reduction := self._in_force.reduction).is_pipelined:
                reduction.retire()
            unwrap_gradients(lazy.parameter for lazy in self._params.all)
            self._params.use_all()
        finally:
            self.become_plain()
        # Give DDP a new reducer without a hook. Not between a forward and its backward: the new reducer would not
        # reduce the gradients of a forward that the old reducer has prepared. Nor if it would reduce other ones.
        buckets = self._in_force.buckets
        if was_registered and not (self._awaits_backward or self._in_backward) and buckets.may_be_rebuilt:
            rebuild_buckets(self.model, buckets.cap_bytes_when_left)
        # Drop references now: this object is part of reference cycles, which may be collected only many models later,
        # and updates of a network that is attached again are deferred only if nothing else refers to its memory.
        self._in_force.drop_references()
        self._params.drop_references()
        self._memory_formats.drop_references()
        del self._compiled

    def end_iteration(self) -> None:
        """End the iteration, so that what it leaves behind is known."""
        if (reduction := self._in_force.reduction).is_pipelined:
            if self._in_backward and not self.is_detached:
                raise RuntimeError(
                    "what an iteration leaves behind is not known in the middle of a backward, or after one that has "
                    "raised: call state.detach() first, on all ranks"
                )
            reduction.retire()

    def become_plain(self) -> None:
        """Remove all hooks; nothing is deferred from now on."""
        self.is_detached = True
        for part in (self._updates, self._watch, self._guard, self._compiled, self._unreduced):
            part.remove()
        if (ddp := self._moments.model_if_there) is not None:
            allow_methods(ddp)
            self._in_force.buckets.leave(ddp)
            self._weighing.remove()
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
        if self.is_detached:
            if self._is_registered():
                raise RuntimeError(
                    "this DearState was detached and cannot be used again: attach(ddp, optimizer) makes a new one"
                )
            return self._in_force.reduce_after_detach(bucket)  # the forward of this backward ran before detach()
        if gpu.is_capturing(self._device):
            raise RuntimeError(
                "dear_hook cannot be captured in a CUDA graph, because its step spans two iterations: "
                "capture without the hook, or call state.detach() first"
            )
        index, parameters = bucket.index(), bucket.parameters()
        # An index that repeats or decreases means that the previous backward raised.
        is_first = not self._in_backward or index <= self._last_bucket
        if is_first and self._learns_graph(index, parameters):
            index, is_first = self._last_bucket + 1, False
        if is_first:
            self._begin_backward()
        self._last_bucket = index
        self._layouts.record(index, parameters)
        self._moments.bucket_arrives(parameters, is_first=is_first)
        future = self._in_force.reduction.reduce(bucket, index, parameters)
        if self._layouts.complete:
            # Queue again, for the graph task of the last bucket: reentrant checkpointing runs several graph tasks.
            call_after_backward(self._graph_task_ended)
        elif bucket.is_last() and not may_skip_buckets(self.model):
            names = ", ".join(self._params.all[index].name for index in self._layouts.missing())
            raise RuntimeError(
                f"DDP has stopped reducing {names} since dear_hook was attached, because other code has given it a new "
                "reducer: call state.detach() before that, and attach after it"
            )
        return future

    def _learns_graph(self, index: int, parameters: Sequence[Tensor]) -> bool:
        """Whether DDP learns a static graph in this backward: all buckets come at its end then, each as number 0."""
        is_next = self._in_backward and index == 0 and not self._layouts.have_arrived(parameters)
        return is_next and self.model.static_graph

    def _begin_backward(self) -> None:
        self._in_force.reduction.retire()
        if self._in_force.plain_reason is None:
            self._memory_formats.refuse_changes()
        self._weighing.weigh()
        self._in_backward = True
        self._awaits_backward = False
        self._layouts.begin_backward()
        self._in_force.choose()
        self._in_force.reduction.begin_backward(same_buckets=self._layouts.stays)
        call_after_backward(self._graph_task_ended)

    def _backward_reaches_output(self) -> None:
        # Among the first things of a backward, so that we are the first to hear of its end. Other code that has asked
        # for that, and asks once more then, as FSDP and AdaScale do, finds in plain DDP what DDP has reduced.
        if not self.is_detached:
            call_after_backward(self._first_to_hear_of_end)

    def _first_to_hear_of_end(self) -> None:
        if self._in_backward:  # else no gradient was accumulated, or in no_sync()
            self._graph_task_ended()

    def _graph_task_ended(self) -> None:
        if self._layouts.complete:
            self._in_force.reduction.before_ddp_writes()
        # Queue again, to run after DDP's own callback, which copies buckets into gradients.
        call_after_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        if not self._in_backward or not (self._layouts.complete or may_skip_buckets(self.model)):
            return
        self._in_backward = False
        self._guard.end_backward()
        self._layouts.end_backward()
        self._iterations.reduced()
        self._moments.inside.backward_ends()
        reduction = self._in_force.reduction
        reduction.end_backward()
        self._unreduced.backward_reduced(reduction.gradients)
        if reduction.is_pipelined:
            self._weighing.refuse_unweighted(reduction.unassigned)
            if self._compiled.needs_gradients:
                self._in_force.finish_gradients()
        elif self._seen_forward:
            self._in_force.say_why_plain(self._iterations.fallbacks)
        else:
            self._iterations.fallbacks.note(*_PAST_FORWARD)
        self._moments.around.backward_ends()
        self._iterations.ended(is_pipelined=reduction.is_pipelined)

    # Forwards, and other readers of parameters.

    def _is_registered(self) -> bool:
        ddp = self._moments.model_if_there
        states = () if ddp is None else [state for _, state in comm_hooks_of(ddp) if isinstance(state, HookState)]
        return any(state.reduces_with(self) for state in states)

    def _before_forward(self) -> None:
        if not self._seen_forward:
            self._seen_forward = True
            if not self._is_registered():
                self._iterations.fallbacks.note(
                    "a DearState was built but its hook is not registered: call "
                    "ddp.register_comm_hook(state, dear_hook), or use attach(ddp, optimizer)"
                )
        self._guard.remove()
        if not torch.is_grad_enabled():
            # Code that runs without gradients may check a parameter's class, as TransformerEncoder's fast path does.
            self._params.use_all()
            return
        self._in_force.buckets.forward_begins()
        if self._follow_plan():
            return
        self._moments.inside.forward_begins(self.model)
        self._updates.runner.refuse_to_go_on()
        self._had_begun = self._in_force.has_begun  # a plan may begin in the backward of this forward
        if self._in_force.plain_reason is None and not self._had_begun:
            self._params.arm_all()  # no update is pending yet: arm parameters only to learn the use order
        self._params.watch_uses(self._in_force.begin_forward(), see_all=self._in_force.sees_all_uses)
        self._iterations.early_reads.begin_forward()
        self._compiled.before_forward()

    def _follow_plan(self) -> bool:
        """Follow the plan in force; returns whether that was to leave DDP alone."""
        if self._awaits_backward:
            return False  # of an earlier forward, which is known to the C++ reducer that DDP has now
        if (sentence := self._in_force.follow()) is not None:
            self._on_leave(sentence)
        return sentence is not None

    def _after_forward(self, returned: bool, output: object) -> None:
        self._iterations.early_reads.end_forward()
        self._params.watch_uses(self._guard.note_touch, see_all=False)
        if not torch.is_grad_enabled():
            return
        reduces = self.model.require_backward_grad_sync
        # The reducer may still wait for the backward of an earlier forward, whatever this one is. For one that raised,
        # perhaps because of Ctrl-C in a wait for a peer, DDP prepares none.
        self._awaits_backward = self._awaits_backward or (reduces and returned)
        self._unreduced.forward_ended(reduces=reduces)
        reduction = self._in_force.reduction
        if not reduces:
            reduction.expect_unreduced()  # the backward of this forward adds what no rank has shared
        before_backward = functools.partial(call_before_backward, output)
        self._moments.inside.forward_ends(self.model, output, before_backward)
        if returned:
            self._in_force.end_forward()
        if reduces and returned:
            before_backward(self._backward_reaches_output)
        self._guard.end_forward(before_backward)
        if returned:
            on_all_ranks = reduces or not self._weighing.may_leave_out_forwards
            reduction.end_forward(before_backward if reduces else None, on_all_ranks=on_all_ranks)

    def _stale_read(self, lazy: LazyParam) -> None:
        """Handle a gradient that arrives for a parameter which this forward has not touched."""
        if not self._had_begun or lazy.why_never_lazy is not None:
            # No update was pending, so this read was right; never defer updates of this parameter.
            lazy.never_defer(
                "is read in forward by code that bypasses __torch_function__ (TorchScript or a C++ extension)"
            )
            return
        raise StaleParameterError(
            f"this forward used {lazy.name} in code that bypasses __torch_function__ (TorchScript or a C++ extension), "
            "which no earlier forward had done, so perhaps before its deferred update was applied: call "
            "state.synchronize() before such a forward, or attach with schedule='allreduce'"
        )
