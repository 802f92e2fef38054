"""Deferred optimizer updates.

``optimizer.step()`` runs as always, with its hooks, its closure and its return value, but gradients that are still on
the wire are hidden from it. What it would have done with them is noted: the optimizer and its hyperparameters as they
are now (schedulers change them right after). When a fusion group has arrived, the same ``step`` runs on just the
parameters of that group. Works for optimizers whose update of one parameter does not depend on the others;
``separability`` finds out.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.gradients import PendingGrad
from ddp_crossover.slots import Slot
from ddp_crossover.stats import FallbackLog
from ddp_crossover.torch_internals import move_to_front, raw_step, step_pre_hooks, without_step_hooks

# GradScaler hands these to fused optimizers as attributes, for the duration of one step.
_SCALER_ATTRIBUTES = ("grad_scale", "found_inf")


class _Snapshot(NamedTuple):
    """An optimizer as it was when ``step()`` was called."""

    optimizer: Optimizer
    groups: list[dict[str, Any]]
    scaler_attributes: dict[str, Any]


class _Update(NamedTuple):
    """What is still to be done with one parameter."""

    snapshot: _Snapshot
    group: int
    shadow: Tensor | None


class DeferredUpdates:
    """Takes over the optimizers of one model.

    Args:
        optimizers: the optimizers and, for each, why its updates cannot be deferred (None if they can).
        fallbacks: told when a step could not be deferred.
        strict: parameters that wait for an update hold NaN until then.
    """

    def __init__(
        self,
        optimizers: list[tuple[Optimizer, str | None]],
        fallbacks: FallbackLog,
        *,
        strict: bool,
    ) -> None:
        self.pipeline: Pipeline | None = None
        self.enabled = True
        self._fallbacks = fallbacks
        self._strict = strict
        self._stepping: Optimizer | None = None
        self._step_frame: FrameType | None = None
        self._nested_calls = 0
        self._iteration = 0
        self._hidden: list[tuple[Slot, PendingGrad, int]] = []
        self._snapshot: _Snapshot | None = None
        self._reasons = dict(optimizers)
        self.deferred_steps = 0
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

    def flush(self) -> None:
        """Apply everything that has been asked for."""
        if self.pipeline is not None:
            self.pipeline.flush()

    @property
    def pending(self) -> bool:
        """Whether any parameter waits for its update."""
        return self.pipeline is not None and self.pipeline.has_updates

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
        if pipeline.has_updates:
            # Whosever update it is: two optimizers may share a parameter.
            slots = [pipeline.slot_of.get(parameter) for parameter in optimizer_parameters(optimizer)]
            pipeline.catch_up({g for s in slots if s is not None and s.update is not None for g in s.groups})
        reason = self._reasons[optimizer]
        if reason is None and (len(args) > 2 or set(kwargs) - {"closure"}):
            reason = "it was called with arguments besides the closure"
        if reason is not None:
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
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or (slot := pipeline.slot_of.get(parameter)) is None:
                    continue
                if grad is not slot.pending.current or grad.resolved:
                    read_early += 1
                    continue
                self._hidden.append((slot, grad, index))
                parameter.grad = None
        if read_early:
            self._fallbacks.note(
                "gradients were read or replaced before optimizer.step(): their update is not deferred. "
                "To clip or unscale without a wait use state.clip_grad_norm_ and ddp_crossover.GradScaler"
            )
        if self._hidden:
            self._snapshot = _take_snapshot(optimizer)

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
        for slot, _, group in hidden:
            pipeline.defer(slot, _Update(snapshot, group, self._hide_parameter(slot.parameter)))

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

    def _hide_parameter(self, parameter: Tensor) -> Tensor | None:
        if not self._strict:
            return None
        shadow = parameter.detach().clone()
        parameter.data.fill_(float("nan"))
        return shadow

    # Later, group by group.

    def apply(self, gradients: dict[Slot, Tensor]) -> None:
        """Run the noted updates of parameters with these reduced gradients."""
        by_snapshot: dict[int, tuple[_Snapshot, dict[int, list[Slot]]]] = {}
        for slot in gradients:
            update = slot.update
            assert isinstance(update, _Update)
            if update.shadow is not None:
                slot.parameter.data.copy_(update.shadow)
            _, groups = by_snapshot.setdefault(id(update.snapshot), (update.snapshot, {}))
            groups.setdefault(update.group, []).append(slot)
            # Before the step: one that raises must not be tried again on half of its parameters.
            slot.update = None
        for snapshot, groups in by_snapshot.values():
            _step_on(snapshot, groups, gradients)


def _step_on(snapshot: _Snapshot, groups: dict[int, list[Slot]], reduced: dict[Slot, Tensor]) -> None:
    optimizer = snapshot.optimizer
    slots = [slot for members in groups.values() for slot in members]
    gradients = [slot.parameter.grad for slot in slots]
    for slot in slots:
        slot.parameter.grad = reduced[slot]
    try:
        with _as_if_called_by_the_user(), without_step_hooks(optimizer), _present_as(optimizer, snapshot, groups):
            raw_step(optimizer)(optimizer)
    finally:
        for slot, gradient in zip(slots, gradients, strict=True):
            slot.parameter.grad = gradient


@contextlib.contextmanager
def _as_if_called_by_the_user() -> Iterator[None]:
    """A forward pre-hook may run inside autocast or inference mode; an optimizer step never does."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextlib.contextmanager
def _present_as(optimizer: Optimizer, snapshot: _Snapshot, groups: dict[int, list[Slot]]) -> Iterator[None]:
    """The optimizer as it was at the snapshot, with only some of its parameters."""
    present_groups = optimizer.param_groups
    present_attributes = {name: getattr(optimizer, name, None) for name in snapshot.scaler_attributes}
    optimizer.param_groups = [
        {**snapshot.groups[index], "params": [slot.parameter for slot in slots]}
        for index, slots in sorted(groups.items())
    ]
    for name, value in snapshot.scaler_attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        optimizer.param_groups = present_groups
        for name, value in present_attributes.items():
            if value is None:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, value)


def _take_snapshot(optimizer: Optimizer) -> _Snapshot:
    return _Snapshot(
        optimizer,
        [hyperparameters(group) for group in optimizer.param_groups],
        {name: _copied(value) for name in _SCALER_ATTRIBUTES if (value := getattr(optimizer, name, None)) is not None},
    )


def pipeline_of(optimizer: Optimizer) -> Pipeline | None:
    """The pipeline that this optimizer's gradients travel through, if any yet."""
    for hook in step_pre_hooks(optimizer):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, DeferredUpdates):
            return owner.pipeline
    return None


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """A param group without its parameters, safe from later changes."""
    return {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return copy.copy(value) if isinstance(value, (dict, set)) else value


def _is_running(frame: FrameType | None) -> bool:
    """Whether the call that ``frame`` belongs to has not returned or raised yet."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in optimizer_parameters(optimizer))
