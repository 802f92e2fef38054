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
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.gradients import PendingGrad
from ddp_crossover.slots import Slot
from ddp_crossover.stats import FallbackLog
from ddp_crossover.torch_internals import move_to_front, raw_step, step_pre_hooks

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

    # The life of one `optimizer.step()`.

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._stepping is optimizer and self._hidden:
            return None  # a subclass' step calls super().step(): one step, two calls of the hooks
        self._restore_gradients()  # a step before this one may have raised
        pipeline = self.pipeline
        if pipeline is None:
            return None
        if pipeline.phase is Phase.BACKWARD and _has_gradients(optimizer):
            raise RuntimeError(
                "optimizer.step() after a backward that did not finish: its gradients have not been "
                "summed over ranks. Skip this step, set the gradients to None, and restart from a checkpoint"
            )
        pipeline.catch_up({g for s in self._waiting(optimizer) for g in s.groups})
        reason = self._reasons[optimizer]
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

        self._stepping = optimizer
        return args[:1], {**kwargs, "closure": closure}

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
        self._stepping, self._hidden, self._snapshot = None, [], None

    def _waiting(self, optimizer: Optimizer) -> Iterator[Slot]:
        assert self.pipeline is not None
        if not self.pipeline.has_updates:
            return
        for slot in self.pipeline.slots:
            if isinstance(slot.update, _Update) and slot.update.snapshot.optimizer is optimizer:
                yield slot

    def _hide_parameter(self, parameter: Tensor) -> Tensor | None:
        if not self._strict:
            return None
        shadow = parameter.detach().clone()
        parameter.data.fill_(float("nan"))
        return shadow

    # Later, group by group.

    def apply(self, slots: list[Slot]) -> None:
        """Run the noted updates of parameters whose gradients are complete."""
        by_snapshot: dict[int, tuple[_Snapshot, dict[int, list[Slot]]]] = {}
        for slot in slots:
            update = slot.update
            assert isinstance(update, _Update)
            if update.shadow is not None:
                slot.parameter.data.copy_(update.shadow)
            _, groups = by_snapshot.setdefault(id(update.snapshot), (update.snapshot, {}))
            groups.setdefault(update.group, []).append(slot)
            # Before the step: one that raises must not be tried again on half of its parameters.
            slot.update = None
        for snapshot, groups in by_snapshot.values():
            _step_on(snapshot, groups)


def _step_on(snapshot: _Snapshot, groups: dict[int, list[Slot]]) -> None:
    optimizer = snapshot.optimizer
    slots = [slot for members in groups.values() for slot in members]
    gradients = [slot.parameter.grad for slot in slots]
    for slot in slots:
        slot.parameter.grad = slot.view
    try:
        with _as_if_called_by_the_user(), _present_as(optimizer, snapshot, groups):
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


def untouched_slots(pipeline: Pipeline, parameters: Iterable[Tensor]) -> list[Slot] | None:
    """The gradients of these parameters, or None unless all are on the wire and were never looked at."""
    slots = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        slot = pipeline.slot_of.get(parameter)  # type: ignore[call-overload]
        if slot is None or not pipeline.is_pending(slot) or slot.update is not None:
            return None
        slots.append(slot)
    if any(not _same_factors(slot, slots[0]) for slot in slots):
        return None
    return slots


def _same_factors(left: Slot, right: Slot) -> bool:
    return list(map(id, left.scales)) == list(map(id, right.scales))


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """A param group without its parameters, safe from later changes."""
    return {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in optimizer_parameters(optimizer))
