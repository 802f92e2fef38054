"""Deferred optimizer updates.

``optimizer.step()`` runs as always, with its hooks, its closure and its return value, but it leaves out the parameters
whose gradients are still on the wire. For those it takes a snapshot of the optimizer and its hyperparameters, because
schedulers change them right after ``step()``. The first touch of such a parameter runs the same ``step`` on just the
parameters of its fusion group. This works for optimizers that update each parameter independently of the others;
``separability`` tests that.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ddp_crossover.collectives.leg import LegError
from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.optim.lazy_state import make_state_lazy, make_state_plain
from ddp_crossover.optim.optimizer_snapshot import OptimizerSnapshot, StandIn, ToUpdate, optimizer_parameters
from ddp_crossover.optim.separability import why_not_separable
from ddp_crossover.parameters.early_reads import Looks, is_saving
from ddp_crossover.parameters.lazy_params import LazyParam, LazyParams, StaleParameterError
from ddp_crossover.parameters.slots import Slot
from ddp_crossover.stats import FallbackLog, logger
from ddp_crossover.torch_internals import (
    called_by_compiled_code,
    has_hooks,
    keeps_overwritten_values,
    move_to_front,
    step_pre_hooks,
    unrecorded,
)

_KEPT = (
    "has a gradient in memory that something else refers to (a tensor, view or buffer kept over backward). To have it "
    "deferred keep clones, or drop them and set gradients to None"
)


class _Update(NamedTuple):
    """The deferred update of a parameter.

    Attributes:
        snapshot: the optimizer as it was when ``step()`` was called.
        group: index of the parameter's param group.
        edits_gradient: whether the update also changes the gradient in place.
    """

    snapshot: OptimizerSnapshot
    group: int
    edits_gradient: bool


class _Step:
    """One call of ``optimizer.step()`` that is running.

    Attributes:
        optimizer: the optimizer that the user called.
        stand_in: the stand-in that runs in its place.
        later: for each param group, the parameters whose updates are deferred.
        snapshot: the optimizer as it is now, for the deferred updates.
    """

    def __init__(self, optimizer: Optimizer, stand_in: StandIn) -> None:
        self.optimizer = optimizer
        self.stand_in = stand_in
        self.later: list[list[LazyParam]] = []
        self.snapshot: OptimizerSnapshot | None = None


class DeferredUpdates:
    """Takes over the optimizers of one model.

    Args:
        optimizers: the optimizers.
        params: the parameters that DDP manages.
        looks: records which line of the script forces pending updates or gradients early.
        fallbacks: records why a step or a parameter was not deferred.
        strict: fill pending parameters with NaN until they are updated.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        params: LazyParams,
        looks: Looks,
        fallbacks: FallbackLog,
        *,
        strict: bool,
    ) -> None:
        self.pipeline: Pipeline | None = None
        self.enabled = True
        self._params = params
        self._looks = looks
        self._fallbacks = fallbacks
        self._strict = strict
        self._under_way: _Step | None = None
        self._broken = ""
        self._applied_in = 0  # the latest iteration of which any update has been written
        self._reasons = {optimizer: why_not_separable(optimizer) for optimizer in optimizers}
        self._settings: dict[Optimizer, list[Any]] = {}
        self.deferred_steps = 0
        params.bring_up_to_date = self.bring_up_to_date
        self._stepped_in = -1
        # This hook is global to the process, so a strong reference would keep the model alive.
        after_any = weakref.WeakMethod(self._after_any_step)
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_post_hook(lambda other, *_: (call := after_any()) and call(other))
        ]
        for optimizer, reason in self._reasons.items():
            if not has_hooks(optimizer):
                self._note_waits(optimizer, reason)
                continue
            after = optimizer.register_step_post_hook(self._after_step)
            move_to_front(optimizer, after)
            self._handles += [
                after,
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_state_dict_pre_hook(lambda _: self.flush()),
                optimizer.register_load_state_dict_pre_hook(lambda *_: self.flush()),
            ]

    def remove(self) -> None:
        """Give the optimizers back."""
        for optimizer in self._reasons:
            make_state_plain(optimizer)
        self._reasons.clear()
        self._settings.clear()
        for handle in self._handles:
            handle.remove()

    def use(self, pipeline: Pipeline | None) -> None:
        """Defer the updates of this pipeline's parameters from now on; None: gradients travel by plain all-reduces."""
        self.pipeline = pipeline
        self._applied_in = 0
        if pipeline is None:
            for optimizer in self._reasons:
                make_state_plain(optimizer)
            return
        pipeline.apply_updates = self.apply
        pipeline.gradients.on_read = self._before_gradient_is_read
        self._params.join = pipeline.order.join if pipeline.link.current_stream() is not None else None

    def bring_up_to_date(self, lazies: Iterable[LazyParam]) -> None:
        """Apply the pending updates of these parameters, whose values are about to be used."""
        pipeline = self.pipeline
        if pipeline is None or not pipeline.updates:
            return
        slots = [slot for lazy in lazies if (slot := pipeline.slots[lazy.index]) in pipeline.updates]
        if not slots:
            return
        self._looks.at_parameters()
        if self._looks.is_inside_forward:
            pipeline.catch_up(slots)
            return
        try:
            # A checkpoint must not mix two steps: apply all pending updates, or none if a leg fails.
            pipeline.catch_up(list(pipeline.updates) if is_saving() else slots)
        except LegError as error:
            if self._applied_in == pipeline.iteration:
                raise
            self._take_back(pipeline, error)

    def _take_back(self, pipeline: Pipeline, error: LegError) -> None:
        """Drop the updates of the last ``step()``, of which none is written and some cannot be completed."""
        with unrecorded():
            for slot in pipeline.updates:
                lazy = self._params.all[slot.index]
                _show_value(lazy)
                lazy.uncover()
                lazy.is_waiting = False
        pipeline.updates.clear()
        self._broken = f"the last optimizer.step() was taken back, because {error}"
        logger.warning(
            "ddp_crossover: %s. Parameters and optimizer are as they were before it, and can be saved like that",
            self._broken,
        )

    def flush(self) -> None:
        """Apply all pending updates and make all parameters plain."""
        self._params.use_all()

    def _flush_if_pending(self) -> None:
        if self.pending:
            self.flush()

    def _before_gradient_is_read(self, slot: Slot) -> None:
        pipeline = self.pipeline
        assert pipeline is not None
        self._looks.at_gradients()
        update = pipeline.updates.get(slot)
        if isinstance(update, _Update) and update.edits_gradient:
            pipeline.catch_up([slot])

    def _why_not_separable(self, optimizer: Optimizer) -> str | None:
        """Why its updates must not be deferred, or None. Tests again when ``_settings`` change."""
        settings = _settings(optimizer)
        if self._settings.setdefault(optimizer, settings) != settings:
            self._settings[optimizer] = settings
            self._reasons[optimizer] = why_not_separable(optimizer)
        return self._reasons[optimizer]

    def _note_waits(self, optimizer: Optimizer, reason: str | None) -> None:
        self._looks.is_explained = True
        self._fallbacks.note(f"{type(optimizer).__name__}.step() waits for all gradients: {reason}")

    def refuse_to_go_on(self) -> None:
        """Raise if the last ``step()`` was taken back, or if an update failed midway.

        Raises:
            StaleParameterError: training must restart from a checkpoint.
        """
        if self._broken:
            raise StaleParameterError(f"{self._broken}: go on from a checkpoint that was saved before")

    @property
    def pending(self) -> bool:
        """Whether any parameter is pending."""
        return self.pipeline is not None and bool(self.pipeline.updates)

    def is_deferred(self, optimizer: Optimizer) -> bool:
        """Whether ``step()`` would defer its updates, judged by the first parameter that has a gradient."""
        pipeline = self.pipeline
        if pipeline is None or not self.enabled or self._reasons[optimizer] is not None:
            return False
        slots = (pipeline.slot_of.get(parameter) for parameter in optimizer_parameters(optimizer))
        slot = next((slot for slot in slots if slot is not None and slot.parameter.grad is not None), None)
        return slot is not None and pipeline.phase is Phase.REDUCED and pipeline.gradients.is_pending(slot)

    # One call of `optimizer.step()`.

    def _after_any_step(self, optimizer: Optimizer) -> None:
        """Report an optimizer that was not attached, unless an attached one has stepped in this iteration."""
        pipeline = self.pipeline
        if pipeline is None or pipeline.phase is not Phase.REDUCED or pipeline.iteration == self._stepped_in:
            return
        if optimizer not in self._reasons and any(p in pipeline.slot_of for p in optimizer_parameters(optimizer)):
            self._note_waits(
                optimizer,
                "it was not attached. Give all optimizers to attach(); after replacing one, call state.detach() and "
                "attach again",
            )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._under_way = None  # left over if the last step raised
        self.refuse_to_go_on()
        pipeline = self.pipeline
        if pipeline is None:
            return None
        self._stepped_in = pipeline.iteration
        if pipeline.phase is Phase.BACKWARD and _has_gradients(optimizer):
            raise RuntimeError(
                "optimizer.step() after a backward that did not finish: its gradients have not been "
                "summed over ranks. Skip this step, set the gradients to None, and restart from a checkpoint"
            )
        if pipeline.updates:
            # Also updates of other optimizers: two optimizers may share a parameter.
            slots = [pipeline.slot_of.get(parameter) for parameter in optimizer_parameters(optimizer)]
            pipeline.catch_up([slot for slot in slots if slot is not None])
        reason = self._why_not_separable(optimizer)
        if reason is None and (len(args) > 2 or set(kwargs) - {"closure"}):
            reason = "it was called with arguments besides the closure"
        if reason is None and called_by_compiled_code():
            reason = "it is called by compiled code, which adds up in another way"
        if reason is None and keeps_overwritten_values():
            reason = "it is called inside of allow_mutation_on_saved_tensors(), which keeps what an update overwrites"
        if reason is not None:
            self._note_waits(optimizer, reason)
        if reason is not None or not self.enabled:
            self._applied_in = pipeline.iteration
            if pipeline.phase is Phase.REDUCED:
                pipeline.gradients.unwrap()  # step() may pass them to a compiled function
            make_state_plain(optimizer)
            return None
        make_state_lazy(optimizer)
        user_closure = args[1] if len(args) > 1 else kwargs.get("closure")
        step = self._under_way = _Step(optimizer, StandIn(args[0], _is_ours))

        def closure() -> Any:
            # This is the last moment before the optimizer reads the gradients: after all pre-hooks, and after a
            # forward and backward in the user's closure, as in Lightning.
            loss = user_closure() if user_closure is not None else None
            self._divide(step)
            return loss

        return (step.stand_in.optimizer,), {"closure": closure}

    def _divide(self, step: _Step) -> None:
        """Decide which parameters this step updates now, and which are deferred."""
        pipeline = self.pipeline
        assert pipeline is not None
        groups: list[list[Tensor]] = [group["params"] for group in step.stand_in.original.param_groups]
        if pipeline.phase is Phase.REDUCED:
            step.snapshot = OptimizerSnapshot(step.optimizer)
            step.later = [self._lazy(pipeline, group) for group in groups]
            groups = [_without(group, later) for group, later in zip(groups, step.later, strict=True)]
        if any(parameter.grad is not None for group in groups for parameter in group):
            self._applied_in = pipeline.iteration
        step.stand_in.take(groups)

    def _lazy(self, pipeline: Pipeline, parameters: Sequence[Tensor]) -> list[LazyParam]:
        """The parameters whose updates can be deferred."""
        read_early = 0
        candidates = []
        never: dict[LazyParam, str] = {}
        for parameter in parameters:
            grad = parameter.grad
            if grad is None or (lazy := self._params.of_id.get(id(parameter))) is None:
                continue
            if not parameter.requires_grad:  # frozen since backward; the optimizer may check that
                continue
            slot = pipeline.slots[lazy.index]
            if slot.is_kept:
                never[lazy] = _KEPT
            elif not slot.pending.is_current(grad):
                read_early += 1
            elif lazy.why_never_lazy is not None:
                never[lazy] = lazy.why_never_lazy
            else:
                candidates.append(lazy)
        self._note_not_deferred(never)
        if read_early:
            self._fallbacks.note(
                "gradients were read or replaced before optimizer.step(): their update is not deferred. "
                "To clip or unscale without a wait use state.clip_grad_norm_ and ddp_crossover.GradScaler"
            )
        return candidates

    def _note_not_deferred(self, why_not: Mapping[LazyParam, str]) -> None:
        names: dict[str, list[str]] = {}
        for lazy, reason in why_not.items():
            names.setdefault(reason, []).append(lazy.name)
        for reason, (first, *others) in names.items():
            self._looks.is_explained = True
            more = f" (and {len(others)} more)" if others else ""
            self._fallbacks.note(f"the update of {first}{more} is not deferred, because it {reason}")

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, pipeline = self._under_way, self.pipeline
        if step is None or pipeline is None:
            return
        self._under_way = None
        step.stand_in.give_back()
        if not any(step.later):
            return
        assert step.snapshot is not None
        make_state_lazy(optimizer).before_look = self._flush_if_pending
        self.deferred_steps += 1
        with self._params.lock:
            # Checked after the step, which may itself have created references to a parameter's memory.
            why_not = self._params.why_not_lazy([lazy for lazies in step.later for lazy in lazies])
            for index, lazies in enumerate(step.later):
                # With `grad_scale` a fused optimizer unscales gradients in place.
                edits_gradient = getattr(optimizer, "grad_scale", None) is not None
                update = _Update(step.snapshot, index, edits_gradient)

                def note_update(lazy: LazyParam, update: _Update = update) -> None:
                    pipeline.updates[pipeline.slots[lazy.index]] = update

                waiting = []
                for lazy in lazies:
                    if lazy in why_not:
                        lazy.version = lazy.memory._version
                        note_update(lazy)
                    else:
                        waiting.append(lazy)
                self._params.make_lazy(waiting, note_update, hide_values=self._strict)
            pipeline.catch_up([pipeline.slots[lazy.index] for lazy in why_not])
            self._note_not_deferred(why_not)

    # Applying deferred updates, group by group.

    def apply(self, slots: list[Slot]) -> None:
        """Run the deferred updates of these parameters, whose reduced gradients are complete."""
        pipeline = self.pipeline
        assert pipeline is not None
        self._applied_in = pipeline.iteration
        slots.sort(key=lambda slot: slot.index)  # the usual order, which matters for parameters that share memory
        params = self._params
        lazies = [params.all[slot.index] for slot in slots]
        claimed: dict[Slot, _Update] = {}
        with unrecorded():
            for lazy in lazies:
                lazy.uncover()
        before, params.updating = params.updating, params.updating.union(lazies)
        try:
            for slot, lazy in zip(slots, lazies, strict=True):
                # Clear first: a retry after a partial failure would update twice.
                if (update := pipeline.updates.pop(slot, None)) is not None:
                    assert isinstance(update, _Update)
                    claimed[slot] = update
                lazy.is_waiting = False
            self._step(claimed, pipeline.gradients.for_update(claimed))
        except BaseException as error:
            # As after a plain step() that raised: values can be read and saved, but training must not go on.
            self._broken = f"an update of {slots[0].name} and others broke off ({type(error).__name__}: {error})"
            raise
        finally:
            params.updating = before
            for lazy in lazies:
                lazy.memory.grad = None  # frees a copy that was cast back from the wire dtype

    def _step(self, claimed: dict[Slot, _Update], gradients: dict[Slot, Tensor]) -> None:
        members: dict[_Update, list[ToUpdate]] = {}
        for slot, update in claimed.items():
            lazy = self._params.all[slot.index]
            memory = lazy.memory
            if self._strict or lazy.is_written:
                _show_value(lazy)
            memory.grad = gradients[slot]
            members.setdefault(update, []).append(ToUpdate(slot.parameter, memory))
        with _as_if_called_by_the_user():
            for update, to_update in members.items():
                update.snapshot.step(update.group, to_update)


def _show_value(lazy: LazyParam) -> None:
    """Restore the value hidden by ``strict``, and raise if the memory was written to while the update was pending.

    Raises:
        StaleParameterError: code that torch cannot observe wrote to the parameter.
    """
    memory, shadow = lazy.memory, lazy.shadow
    is_written = lazy.is_written
    if shadow is not None:
        is_written = is_written or not bool(memory.isnan().all())
        memory.data.copy_(shadow)
        lazy.shadow = None
    if is_written:
        raise StaleParameterError(
            f"{lazy.name} was written while its update was pending, by code that torch does not tell of (an extension, "
            "or a pointer): what it wrote is older than the update. Call state.synchronize() before such a write"
        )


def _without(parameters: list[Tensor], lazies: Sequence[LazyParam]) -> list[Tensor]:
    if not lazies:
        return parameters
    if len(lazies) == len(parameters):
        return []
    ids = {id(lazy.parameter) for lazy in lazies}
    return [parameter for parameter in parameters if id(parameter) not in ids]


@contextlib.contextmanager
def _as_if_called_by_the_user() -> Iterator[None]:
    """Leave autocast, inference mode and grad mode: a touch may happen inside them, but ``step()`` runs outside."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def pipeline_of(optimizer: Optimizer) -> Pipeline | None:
    """The pipeline that carries this optimizer's gradients; None if it has none yet or is not attached."""
    for hook in step_pre_hooks(optimizer):
        if _is_ours(hook):
            owner: DeferredUpdates = hook.__self__
            return owner.pipeline
    return None


def _settings(optimizer: Optimizer) -> list[Any]:
    """Which hyperparameters are on: the value of a bool, else the type and whether it is zero.

    Leaves out ``lr``, which schedulers move to zero and back.
    """
    return [
        {
            key: value if isinstance(value, bool) else (type(value), isinstance(value, (int, float)) and not value)
            for key, value in group.items()
            if key not in ("params", "param_names", "lr")
        }
        for group in optimizer.param_groups
    ]


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), DeferredUpdates)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in optimizer_parameters(optimizer))
