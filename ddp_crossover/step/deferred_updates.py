"""Calls of ``optimizer.step()``: which of them wait for all gradients, and why; what the others leave for later.

``optimizer.step()`` runs as always, with its hooks, its closure and its return value, but it leaves out the parameters
whose gradients are still on the wire. For those it takes a snapshot of the optimizer and its hyperparameters, because
schedulers change them right after ``step()``. The first touch of such a parameter runs the same ``step`` on just the
parameters of its fusion group. This works for optimizers that update each parameter independently of the others, as
``separability`` tries on a clone and ``watching`` sees in the first steps.

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.pending.early_reads import EarlyReads
from ddp_crossover.pending.lazy_param import LazyParam
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.pending.reduced_gradients import ReducedGradients
from ddp_crossover.pending.slots import Slot
from ddp_crossover.pipeline.gathers import Gathers, GradientGathers
from ddp_crossover.report.stats import FallbackLog
from ddp_crossover.step.after_update import AfterUpdate
from ddp_crossover.step.run_updates import DeferredUpdate, run_updates
from ddp_crossover.step.step_call import (
    Deferrable,
    StepCall,
    closure_of,
    why_call_waits,
    why_closure_waits,
    why_surroundings_wait,
)
from ddp_crossover.step.update_runner import EarlyAnswers, UpdateRunner
from ddp_crossover.torch_internals.optimizers import has_hooks, move_to_back, move_to_front, step_pre_hooks
from ddp_crossover.watching.at_sight import why_names_matter, why_no_copy, why_parameters_repeat
from ddp_crossover.watching.caches import caches_among, why_updates_may_differ
from ddp_crossover.watching.known_optimizers import KnownOptimizers
from ddp_crossover.watching.lazy_state import make_state_lazy, make_state_plain, why_state_is_shared
from ddp_crossover.watching.optimizer_snapshot import StandIn, optimizer_parameters, shared_state
from ddp_crossover.watching.state_entries import entries_of_state, look_at_all, why_entries_depend
from ddp_crossover.watching.step_watch import StepWatch

_TOO_LATE = (
    "it is called between a forward and its backward, which will overwrite the gradients. To have updates deferred, "
    "call step() before the next forward"
)
_CLOSURE_WITH_SHARED_STATE = "it was called with a closure, and its state has entries that belong to no parameter"


class Reductions(Protocol):
    """Follows which gradients were reduced."""

    def refuse_unreduced(self, optimizer: Optimizer, gradients: ReducedGradients | None, *, has_closure: bool) -> None:
        """Warn, or raise RuntimeError, if this optimizer is about to use gradients that are not reduced.

        Args:
            optimizer: the optimizer.
            gradients: those of the pipeline, if there is one.
            has_closure: whether it was given a closure, which makes the gradients that it updates with.
        """


def _gradient_gathers(pipeline: Pipeline, memory: Mapping[str, Tensor]) -> Gathers:
    return GradientGathers(pipeline.gather_order)


class DeferredUpdates:
    """Takes over the optimizers of one model.

    Args:
        optimizers: the optimizers.
        params: the parameters that DDP manages.
        early_reads: records which line of the script forces pending updates or gradients early.
        fallbacks: records why a step or a parameter was not deferred.
        reductions: may refuse a step.
        strict: fill pending parameters with NaN until they are updated.
        early_answers: makes what answers torch's clipping and loss scaling for a pipeline, whose gradients are pending;
            None: they wait for whole gradients.
        write: puts the updated values into parameters whose gather legs have arrived.
        gathers: makes what gather legs carry for these updates, with memory of the previous plan's.

    Attributes:
        after_update: told of each parameter that has been updated.
        runner: runs the updates that are pending.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        params: LazyParams,
        early_reads: EarlyReads,
        fallbacks: FallbackLog,
        reductions: Reductions,
        *,
        strict: bool,
        early_answers: EarlyAnswers | None,
        write: Callable[[Pipeline, Mapping[Slot, DeferredUpdate]], None] = run_updates,
        gathers: Callable[[Pipeline, Mapping[str, Tensor]], Gathers] = _gradient_gathers,
    ) -> None:
        self._params = params
        self._early_reads = early_reads
        self._fallbacks = fallbacks
        self._reductions = reductions
        self._running: StepCall | None = None
        self._watch: StepWatch | None = None
        self.after_update = AfterUpdate()
        self.runner = UpdateRunner(
            params, self.after_update, early_reads, fallbacks, write, gathers, early_answers, strict=strict
        )
        self._optimizers = KnownOptimizers(optimizers, self._name_of)
        look_at_all()  # these may have been loaded with tensors of others
        self._deferrable = Deferrable(params, early_reads, fallbacks)
        self._stepped_in = -1
        # These hooks are global to the process, so strong references would keep the model alive.
        before_any, after_any = map(weakref.WeakMethod, (self._before_any_step, self._after_any_step))
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(lambda one, *_: (call := before_any()) and call(one)),
            register_optimizer_step_post_hook(lambda one, *_: (call := after_any()) and call(one)),
        ]
        for optimizer in self._optimizers:  # each once, even if it was given twice
            if not has_hooks(optimizer):
                self._note_waits(optimizer, self._optimizers.why_not(optimizer))
                continue
            after = optimizer.register_step_post_hook(self._after_step)
            move_to_front(optimizer, after)
            self._handles += [
                after,
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_load_state_dict_pre_hook(lambda *_: self._before_load()),
                # Torch collects the param groups before the state, and updates may count in them.
                optimizer.register_state_dict_pre_hook(lambda _: self._flush_state()),
            ]

    def remove(self) -> None:
        """Give the optimizers back. What was given to ``after_update`` is called by plain hooks from now on."""
        optimizers = list(filter(has_hooks, self._optimizers))
        for other in {other for optimizer in optimizers for other in _owners_of(optimizer)} - {self}:
            self.after_update.leave_out(lazy.parameter for lazy in other._params.all)
            other.after_update.leave_out(lazy.parameter for lazy in self._params.all)
        self.after_update.leave_alone(optimizers, _parameters_of_models)
        for optimizer in self._optimizers:
            make_state_plain(optimizer, self)
        self._optimizers.drop_references()
        for handle in self._handles:
            handle.remove()

    def use(self, pipeline: Pipeline | None) -> None:
        """Defer the updates of this pipeline's parameters from now on; None: gradients travel by plain all-reduces."""
        self.runner.use(pipeline)

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline whose parameters' updates are deferred; None: gradients travel by plain all-reduces."""
        return self.runner.pipeline

    def _before_load(self) -> None:
        self._params.use_all()
        look_at_all()

    def _flush_state(self) -> None:
        # Also while the last update is being written, perhaps by another thread: this waits for it.
        if self.pending or self._params.updating:
            self._params.use_all()

    def _name_of(self, parameter: Tensor) -> str:
        lazy = self._params.of_id.get(id(parameter))
        return f"a parameter of shape {list(parameter.shape)}" if lazy is None else lazy.name

    def _note_waits(self, optimizer: Optimizer, reason: str | None) -> None:
        self._early_reads.explain()
        self._fallbacks.note(
            f"{type(optimizer).__name__}.step() waits for all gradients and defers nothing, because {reason}"
        )

    def consolidate(self, ranks: Iterable[int]) -> None:
        """Give the optimizers of these ranks their whole state. A collective, if it is not there already."""

    @property
    def pending(self) -> bool:
        return self.pipeline is not None and bool(self.pipeline.updates)

    def is_deferred(self, optimizer: Optimizer) -> bool:
        """Whether ``step()`` would defer its updates, judged by the first parameter that has a gradient."""
        pipeline = self.pipeline
        if pipeline is None or pipeline.awaits_backward:
            return False
        if self._optimizers.why_not(optimizer) is not None or self._is_to_be_watched(optimizer):
            return False
        slots = (pipeline.slot_of.get(parameter) for parameter in optimizer_parameters(optimizer))
        slot = next((slot for slot in slots if slot is not None and slot.parameter.grad is not None), None)
        return slot is not None and pipeline.phase is Phase.REDUCED and pipeline.gradients.is_pending(slot)

    # One call of `optimizer.step()`.

    def _before_any_step(self, optimizer: Optimizer) -> None:
        """Run last in this step: torch calls hooks of all optimizers before it goes through those of this one."""
        if optimizer in self._optimizers and has_hooks(optimizer):
            move_to_back(optimizer, self._before_step)

    def _after_any_step(self, optimizer: Optimizer) -> None:
        """Report an optimizer that was not attached, unless an attached one has stepped in this iteration."""
        pipeline = self.pipeline
        if pipeline is None or pipeline.phase is not Phase.REDUCED or pipeline.iteration == self._stepped_in:
            return
        if optimizer in self._optimizers or not any(p in pipeline.slot_of for p in optimizer_parameters(optimizer)):
            return
        if (wrapper := self._optimizers.wrapper_of(optimizer)) is not None:
            self._note_waits(wrapper, self._optimizers.why_not(wrapper))
        else:
            self._note_waits(
                optimizer,
                "this optimizer was not attached. Pass a list of all optimizers to attach(); after replacing one, call "
                "state.detach() and attach again",
            )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._running = None  # left over if the last step raised
        self._stop_watching()
        user_closure = closure_of(args, kwargs)
        self._refuse_step(optimizer, user_closure)
        self._optimizers.look_again(optimizer)
        pipeline = self.pipeline
        if pipeline is None:
            # Here, not in use(): that may run in a closure of a step, which has the state.
            make_state_plain(optimizer, self)
            return self._step_as_it_is(optimizer, args, kwargs)
        self._finish_last_step(optimizer, pipeline)
        verdict = self._optimizers.verdict(optimizer)
        caches = caches_among(optimizer, verdict.counters)
        reason = (
            self._optimizers.why_not(optimizer)
            or why_call_waits(args, kwargs)
            or why_surroundings_wait()
            or why_state_is_shared(optimizer)
            or why_entries_depend(optimizer)
            or why_no_copy(optimizer, verdict.counters)
            or why_parameters_repeat(optimizer)
            or why_names_matter(optimizer, verdict.outside)
            or (_TOO_LATE if pipeline.awaits_backward else None)
            or why_closure_waits(user_closure, verdict)
            or (_CLOSURE_WITH_SHARED_STATE if user_closure is not None and shared_state(optimizer) else None)
            or why_updates_may_differ(optimizer, caches)
        )
        if reason is not None:
            self._note_waits(optimizer, reason)
        if reason is not None or self._is_to_be_watched(optimizer):
            self.runner.note_written()
            self._early_reads.explain()
            if pipeline.phase is Phase.REDUCED:
                pipeline.gradients.unwrap()  # step() may pass them to a compiled function
            make_state_plain(optimizer, self)
            return self._step_as_it_is(optimizer, args, kwargs)
        make_state_lazy(optimizer, self)
        step = self._running = StepCall(optimizer, StandIn(args[0], is_ours), self, verdict.counters, caches)

        def divide() -> None:
            if step.divide(self.pipeline, self._deferrable):
                self.runner.note_written()

        if user_closure is None:
            # This is the last moment before the optimizer reads the gradients, after all other hooks.
            divide()
            return (step.stand_in.optimizer,), {}

        def closure() -> Any:
            # It may run a forward and backward, as in Lightning.
            loss = user_closure()
            divide()
            return loss

        return (step.stand_in.optimizer,), {"closure": closure}

    def _is_to_be_watched(self, optimizer: Optimizer) -> bool:
        """Whether to see first what a step does; then no model defers anything of this optimizer."""
        return any(owner._optimizers.is_to_be_watched(optimizer) for owner in _owners_of(optimizer))

    def _step_as_it_is(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Let a step update all parameters, and watch it if that is called for."""
        # If an optimizer has several models, that of the last hook watches for all of them.
        if (
            not self._is_to_be_watched(optimizer)
            or getattr(step_pre_hooks(optimizer)[-1], "__self__", None) is not self
            or why_call_waits(args, kwargs) is not None
        ):
            return None
        watch = self._watch = StepWatch(optimizer)
        closure = closure_of(args, kwargs)
        watch.start()
        return watch.until_freed((args[0],)), {} if closure is None else {"closure": watch.around(closure)}

    def _stop_watching(self) -> StepWatch | None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        return watch

    def _refuse_step(self, optimizer: Optimizer, closure: object) -> None:
        self.runner.refuse_to_go_on()
        gradients = None if self.pipeline is None else self.pipeline.gradients
        self._reductions.refuse_unreduced(optimizer, gradients, has_closure=closure is not None)

    def _finish_last_step(self, optimizer: Optimizer, pipeline: Pipeline) -> None:
        """Apply what is pending of the parameters that a step is about to update, and refuse one that makes no sense.

        Raises:
            RuntimeError: if the gradients are those of a backward that did not finish.
        """
        self._stepped_in = pipeline.iteration
        if pipeline.phase is Phase.BACKWARD and _has_gradients(optimizer):
            raise RuntimeError(
                "optimizer.step() was called after a backward that did not finish, so its gradients have not been "
                "summed over ranks: skip this step, set the gradients to None, and restart from a checkpoint"
            )
        if pipeline.updates:
            # Also updates of other optimizers: two optimizers may share a parameter.
            slots = [pipeline.slot_of.get(parameter) for parameter in optimizer_parameters(optimizer)]
            pipeline.updates.apply([slot for slot in slots if slot is not None])

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, self._running = self._running, None
        later: list[LazyParam] = []
        if (watch := self._stop_watching()) is not None:
            for owner in _owners_of(optimizer):
                owner._optimizers.learn(optimizer, watch.seen)
            watch.forget()
        if step is not None:
            step.stand_in.give_back()
            if step.snapshot is not None:
                step.snapshot.leave_alone()
            later = [lazy for lazies in step.later for lazy in lazies]
            if later:
                self._defer(step, optimizer)
        self._tell_of_step(optimizer, later)

    def _tell_of_step(self, optimizer: Optimizer, later: Sequence[LazyParam]) -> None:
        """Tell those who follow updates that a step has ended, and which parameters' updates were deferred."""
        if self.after_update:
            self.after_update.stepped(
                optimizer,
                others={id(lazy.parameter) for lazy in later}.union(_parameters_of_models(optimizer, but=self)),
                pending=[lazy.parameter for lazy in later if lazy.is_waiting],
            )

    def _defer(self, step: StepCall, optimizer: Optimizer) -> None:
        pipeline = step.pipeline
        assert pipeline is not None and step.snapshot is not None
        make_state_lazy(optimizer, self, self._flush_state)
        verdict = self._optimizers.verdict(optimizer)
        # With `grad_scale` a fused optimizer unscales gradients in place.
        edits_gradient = verdict.edits_gradients or getattr(optimizer, "grad_scale", None) is not None
        foreach = verdict.foreach and entries_of_state(optimizer).are_usual
        updates = [
            DeferredUpdate(step.snapshot, index, edits_gradient, verdict.outside, foreach)
            for index, _ in enumerate(step.later)
        ]
        self.runner.make_pending(pipeline, list(zip(step.later, updates, strict=True)))


def pipeline_of(optimizer: Optimizer) -> Pipeline | None:
    """The pipeline that carries this optimizer's gradients; None if it has none yet or is not attached."""
    owners = _owners_of(optimizer)
    return owners[0].pipeline if owners else None


def _parameters_of_models(optimizer: Optimizer, but: DeferredUpdates | None = None) -> set[int]:
    """Ids of the parameters of all attached models, ``but`` one, that this optimizer trains."""
    return {key for owner in _owners_of(optimizer) if owner is not but for key in owner._params.of_id}


def _owners_of(optimizer: Optimizer) -> list[DeferredUpdates]:
    """Those that defer updates of this optimizer: one for each attached model."""
    return [hook.__self__ for hook in step_pre_hooks(optimizer) if is_ours(hook)]


def is_ours(hook: Any) -> bool:
    """Whether a hook of an optimizer is ours."""
    return isinstance(getattr(hook, "__self__", None), DeferredUpdates)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in optimizer_parameters(optimizer))
