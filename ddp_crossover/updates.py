"""Deferred optimizer updates.

``optimizer.step()`` runs as always, with its hooks, its closure and its return value, but gradients that are still on
the wire are hidden from it. What it would have done with them is noted: the optimizer and its hyperparameters as they
are now (schedulers change them right after). When somebody touches one of these parameters, the same ``step`` runs on
just the parameters of its fusion group. Works for optimizers whose update of one parameter does not depend on the
others; ``separability`` finds out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.gradients import PendingGrad
from ddp_crossover.lazy_params import LazyParam, LazyParams, StaleParameterError
from ddp_crossover.looks import Looks
from ddp_crossover.optimizer_snapshot import OptimizerSnapshot, ToUpdate, optimizer_parameters
from ddp_crossover.slots import Slot
from ddp_crossover.stats import FallbackLog
from ddp_crossover.torch_internals import move_to_front, step_pre_hooks


class _Update(NamedTuple):
    """What is still to be done with one parameter.

    Attributes:
        snapshot: the optimizer as it was.
        group: index of the parameter's param group.
        version: autograd's version of the parameter: another one, when the update is applied, means a write past
            everything.
        shadow: its value, where ``strict`` has put NaN.
    """

    snapshot: OptimizerSnapshot
    group: int
    version: int
    shadow: Tensor | None


class _Hidden(NamedTuple):
    """A gradient that the optimizer must not see during ``step()``."""

    slot: Slot
    grad: PendingGrad
    group: int


class DeferredUpdates:
    """Takes over the optimizers of one model.

    Args:
        optimizers: the optimizers and, for each, why its updates cannot be deferred (None if they can).
        params: the parameters that DDP manages.
        looks: told where somebody needs all updates at once.
        fallbacks: told when a step could not be deferred.
        strict: parameters that wait for an update hold NaN until then.
    """

    def __init__(
        self,
        optimizers: list[tuple[Optimizer, str | None]],
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
        self._stepping: Optimizer | None = None
        self._step_frame: FrameType | None = None
        self._nested_calls = 0
        self._iteration = 0
        self._hidden: list[_Hidden] = []
        self._snapshot: OptimizerSnapshot | None = None
        self._reasons = dict(optimizers)
        self.deferred_steps = 0
        params.bring_up_to_date = self.bring_up_to_date
        self._handles: list[RemovableHandle] = []
        for optimizer, _ in optimizers:
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
        for handle in self._handles:
            handle.remove()

    def use(self, pipeline: Pipeline) -> None:
        """Defer the updates of this pipeline's parameters from now on."""
        self.pipeline = pipeline
        pipeline.apply_updates = self.apply
        pipeline.on_gradient_read = self._looks.at_gradients

    def bring_up_to_date(self, lazies: Iterable[LazyParam]) -> None:
        """Apply what these parameters wait for, because somebody is about to see them."""
        pipeline = self.pipeline
        if pipeline is None or not pipeline.updates:
            return
        slots = [slot for lazy in lazies if (slot := pipeline.slots[lazy.index]) in pipeline.updates]
        if slots:
            self._looks.at_parameters()
            pipeline.catch_up(slots)

    def flush(self) -> None:
        """Apply everything that has been asked for; all parameters are plain after it."""
        self._params.use_all()

    @property
    def pending(self) -> bool:
        """Whether any parameter waits for its update."""
        return self.pipeline is not None and bool(self.pipeline.updates)

    def is_deferred(self, optimizer: Optimizer) -> bool:
        """Whether ``step()`` would only note updates, as far as its first parameter tells."""
        pipeline = self.pipeline
        if pipeline is None or not self.enabled or self._reasons[optimizer] is not None:
            return False
        slots = (pipeline.slot_of.get(parameter) for parameter in optimizer_parameters(optimizer))
        slot = next((slot for slot in slots if slot is not None and slot.parameter.grad is not None), None)
        return slot is not None and pipeline.phase is Phase.REDUCED and pipeline.is_pending(slot)

    # The life of one `optimizer.step()`.

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._stepping is optimizer and _is_running(self._step_frame):
            self._nested_calls += 1  # a subclass' step calls super().step(): one step, two calls of the hooks
            return None
        pipeline = self.pipeline
        if pipeline is None:
            return None
        self._recover_from_broken_step(pipeline)
        if pipeline.phase is Phase.BACKWARD and _has_gradients(optimizer):
            raise RuntimeError(
                "optimizer.step() after a backward that did not finish: its gradients have not been "
                "summed over ranks. Skip this step, set the gradients to None, and restart from a checkpoint"
            )
        if pipeline.updates:
            # Whosever update it is: two optimizers may share a parameter.
            slots = [pipeline.slot_of.get(parameter) for parameter in optimizer_parameters(optimizer)]
            pipeline.catch_up([slot for slot in slots if slot is not None])
        reason = self._reasons[optimizer]
        if reason is None and (len(args) > 2 or set(kwargs) - {"closure"}):
            reason = "it was called with arguments besides the closure"
        if reason is not None:
            self._looks.is_explained = True
            self._fallbacks.note(f"{type(optimizer).__name__}.step() waits for all gradients: {reason}")
        if reason is not None or not self.enabled:
            return None
        user_closure = args[1] if len(args) > 1 else kwargs.get("closure")

        def closure() -> Any:
            # Runs inside the step, after every pre-hook and, as in Lightning, after the user's own
            # forward and backward: the last moment before the optimizer looks at the gradients.
            loss = user_closure() if user_closure is not None else None
            self._hide_gradients(optimizer)
            return loss

        self._stepping, self._step_frame, self._iteration = optimizer, sys._getframe(1), pipeline.iteration
        return args[:1], {"closure": closure}

    def _hide_gradients(self, optimizer: Optimizer) -> None:
        pipeline = self.pipeline
        assert pipeline is not None
        if pipeline.phase is not Phase.REDUCED:
            return
        read_early = 0
        candidates: list[_Hidden] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or (slot := pipeline.slot_of.get(parameter)) is None:
                    continue
                if grad is not slot.pending.current or grad.resolved:
                    read_early += 1
                else:
                    candidates.append(_Hidden(slot, grad, index))
        if read_early:
            self._fallbacks.note(
                "gradients were read or replaced before optimizer.step(): their update is not deferred. "
                "To clip or unscale without a wait use state.clip_grad_norm_ and ddp_crossover.GradScaler"
            )
        lazies = [self._params.all[slot.index] for slot, _, _ in candidates]
        why_not = self._params.why_not_lazy(lazies)
        self._note_not_lazy(lazies, why_not)
        self._hidden = [hidden for hidden, reason in zip(candidates, why_not, strict=True) if reason is None]
        for slot, _, _ in self._hidden:
            slot.parameter.grad = None
        if self._hidden:
            self._snapshot = OptimizerSnapshot(optimizer)

    def _note_not_lazy(self, lazies: Sequence[LazyParam], why_not: Sequence[str | None]) -> None:
        """Their gradients stay where the optimizer sees them, and waits for them."""
        names: dict[str, list[str]] = {}
        for lazy, reason in zip(lazies, why_not, strict=True):
            if reason is not None:
                names.setdefault(reason, []).append(lazy.name)
        for reason, (first, *others) in names.items():
            self._looks.is_explained = True
            more = f" (and {len(others)} more)" if others else ""
            self._fallbacks.note(f"the update of {first}{more} is not deferred, because it {reason}")

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pipeline = self.pipeline
        if self._stepping is not optimizer or pipeline is None:
            return
        if self._nested_calls:
            self._nested_calls -= 1
            return
        hidden, snapshot = self._hidden, self._snapshot
        self._restore_gradients()
        if snapshot is None:
            return
        self.deferred_steps += 1
        lazies = [self._params.all[slot.index] for slot, _, _ in hidden]
        with self._params.lock:
            # As the update would: a backward of an older graph must fail.
            torch.autograd.graph.increment_version([lazy.memory for lazy in lazies])
            for (slot, _, group), lazy in zip(hidden, lazies, strict=True):
                shadow = self._hide_value(lazy.memory)
                pipeline.updates[slot] = _Update(snapshot, group, lazy.memory._version, shadow)
                lazy.arm()  # last: from here on a touch applies the update

    def _restore_gradients(self) -> None:
        for slot, grad, _ in self._hidden:
            slot.parameter.grad = grad
        self._forget_step()

    def _recover_from_broken_step(self, pipeline: Pipeline) -> None:
        """A step that raised has left its gradients hidden; they count unless a backward has come since."""
        if self._hidden and self._iteration == pipeline.iteration:
            self._restore_gradients()
        self._forget_step()

    def _forget_step(self) -> None:
        self._stepping, self._step_frame, self._nested_calls = None, None, 0
        self._hidden, self._snapshot = [], None

    def _hide_value(self, memory: Tensor) -> Tensor | None:
        if not self._strict:
            return None
        shadow = memory.detach().clone()
        memory.data.fill_(float("nan"))
        return shadow

    # Later, group by group.

    def apply(self, slots: list[Slot]) -> None:
        """Run the noted updates of these parameters, whose reduced gradients are complete."""
        pipeline = self.pipeline
        assert pipeline is not None
        lazies = [self._params.all[slot.index] for slot in slots]
        claimed: dict[Slot, _Update] = {}
        try:
            for slot, lazy in zip(slots, lazies, strict=True):
                lazy.is_updating = True
                # Before the step: one that raises must not be tried again on half of its parameters.
                if (update := pipeline.updates.pop(slot, None)) is not None:
                    assert isinstance(update, _Update)
                    claimed[slot] = update
            self._step(claimed, pipeline.reduced(claimed))
        finally:
            for lazy in lazies:
                lazy.is_updating = False

    def _step(self, claimed: dict[Slot, _Update], gradients: dict[Slot, Tensor]) -> None:
        members: dict[OptimizerSnapshot, dict[int, list[ToUpdate]]] = {}
        for slot, update in claimed.items():
            memory = self._params.all[slot.index].memory
            _refuse_write_past_everything(slot, update, memory)
            memory.grad = gradients[slot]
            group = members.setdefault(update.snapshot, {}).setdefault(update.group, [])
            group.append(ToUpdate(slot.parameter, memory))
        with _as_if_called_by_the_user():
            for snapshot, groups in members.items():
                snapshot.step(groups)


def _refuse_write_past_everything(slot: Slot, update: _Update, memory: Tensor) -> None:
    written = memory._version != update.version
    if update.shadow is not None:
        written = written or not bool(memory.isnan().all())
        memory.data.copy_(update.shadow)
    if written:
        raise StaleParameterError(
            f"{slot.name} was written while its update was pending, by code that torch does not tell of (an extension, "
            "or a pointer): what it wrote is older than the update. Call state.synchronize() before such a write"
        )


@contextlib.contextmanager
def _as_if_called_by_the_user() -> Iterator[None]:
    """A parameter may be touched inside autocast or inference mode; an optimizer step never does."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def pipeline_of(optimizer: Optimizer) -> Pipeline | None:
    """The pipeline that this optimizer's gradients travel through, if any yet."""
    for hook in step_pre_hooks(optimizer):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, DeferredUpdates):
            return owner.pipeline
    return None


def _is_running(frame: FrameType | None) -> bool:
    """Whether the call that ``frame`` belongs to has not returned or raised yet."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in optimizer_parameters(optimizer))
