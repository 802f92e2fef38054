"""Runs deferred updates, when the gradients of their parameters are complete, or takes them back.

A step can be taken back while none of its updates has been written. An update that breaks off in the middle leaves some
parameters updated and others not, as a plain ``step()`` would; training does not go on after it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_crossover.comm.leg import LegError
from ddp_crossover.dear import Pipeline
from ddp_crossover.log import say
from ddp_crossover.pending.lazy_params import LazyParams, StaleParameterError
from ddp_crossover.pending.slots import Slot
from ddp_crossover.step.after_update import AfterUpdate
from ddp_crossover.torch_internals.autograd import unrecorded
from ddp_crossover.watching.optimizer_snapshot import OptimizerSnapshot, ToUpdate, is_of_torch
from ddp_crossover.watching.outside_settings import Outside
from ddp_crossover.watching.update_guard import guarded

_ALIGNMENT_BYTES = 64  # of torch's own memory on CPU

# On CPU a call of a kernel costs more than its arithmetic up to some thousand elements. An optimizer goes over a batch
# about ten times, which stays in the cache meanwhile, with its gradients and state.
_SMALL_ELEMENTS = 2**12
_BATCH_ELEMENTS = 2**16
_TOGETHER: Mapping[str, Any] = {"foreach": True}
_AS_SET: Mapping[str, Any] = {}

_AUTOCAST_DEVICES = ("cpu", "cuda")


class DeferredUpdate(NamedTuple):
    """The deferred update of a parameter.

    Attributes:
        snapshot: the optimizer as it was when ``step()`` was called.
        group: index of the parameter's param group.
        edits_gradient: whether the update also changes the gradient in place.
        outside: what the optimizer's code refers to outside of it.
        foreach: whether many small parameters may be updated in one call.
    """

    snapshot: OptimizerSnapshot
    group: int
    edits_gradient: bool
    outside: Outside
    foreach: bool = False


class UpdateRunner:
    """Applies the deferred updates of one model.

    Args:
        params: the parameters that DDP manages.
        after_update: told which parameters have been updated.
        write: puts the updated values into these parameters.
        strict: whether pending parameters hold NaN, so that their values have to be restored first.
    """

    def __init__(
        self,
        params: LazyParams,
        after_update: AfterUpdate,
        write: Callable[[Pipeline, Mapping[Slot, DeferredUpdate]], None],
        *,
        strict: bool,
    ) -> None:
        self._params = params
        self._after_update = after_update
        self._write = write
        self._strict = strict
        self._pipeline: Pipeline | None = None
        self._broken = ""
        self._written_in = 0  # the latest iteration of which any update has been written

    def use(self, pipeline: Pipeline | None) -> None:
        """Apply updates with the gradients of this pipeline from now on."""
        self._pipeline = pipeline
        self._written_in = 0

    def note_written(self) -> None:
        """Note that an update of this iteration has been or is being written, so that the step cannot be taken back."""
        if self._pipeline is not None:
            self._written_in = self._pipeline.iteration

    def refuse_to_go_on(self) -> None:
        """Raise if the last ``step()`` was taken back, or if an update failed midway.

        Raises:
            StaleParameterError: training must restart from a checkpoint.
        """
        if self._broken:
            raise StaleParameterError(f"{self._broken}: restart training from a checkpoint")

    def take_back(self, error: LegError) -> None:
        """Drop the updates of the last ``step()``, some of which cannot be completed because of ``error``.

        Raises:
            LegError: ``error``, if one of the updates has been written already.
        """
        pipeline = self._pipeline
        assert pipeline is not None
        if self._written_in == pipeline.iteration:
            raise error
        with unrecorded():
            for slot in list(pipeline.updates):  # a signal handler may apply some
                lazy = slot.lazy
                lazy.show_value()
                lazy.uncover()
                lazy.end_wait()
        pipeline.updates.clear()
        self._broken = f"the last optimizer.step() was taken back, because {error}"
        say(
            f"{self._broken}. Parameters and optimizer state are those from before that step: save them and restart",
            logging.WARNING,
        )

    def apply(self, slots: list[Slot]) -> None:
        """Run the deferred updates of these parameters, whose reduced gradients are complete."""
        pipeline = self._pipeline
        assert pipeline is not None
        self.note_written()
        slots.sort(key=lambda slot: slot.index)  # the usual order, which matters for parameters that share memory
        params = self._params
        lazies = [slot.lazy for slot in slots]
        claimed: dict[Slot, DeferredUpdate] = {}
        with unrecorded():
            for lazy in lazies:
                lazy.uncover()
        try:
            with params.being_updated(lazies):
                for slot, lazy in zip(slots, lazies, strict=True):
                    # Clear first: a retry after a partial failure would update twice.
                    if (update := pipeline.updates.pop(slot, None)) is not None:
                        assert isinstance(update, DeferredUpdate)
                        claimed[slot] = update
                    lazy.end_wait()
                for slot in claimed:
                    if self._strict or slot.lazy.is_written:
                        slot.lazy.show_value()
                self._write(pipeline, claimed)
                if self._after_update and not self._broken:
                    # In this context: these uses come before forward's, and must not count as its touches.
                    with as_if_called_by_the_user():
                        self._after_update.updated(
                            [slot.parameter for slot, update in claimed.items() if not update.snapshot.was_skipped]
                        )
                params.end_updates(slot.lazy for slot in claimed)
        except BaseException as error:
            # As after a plain step() that raised: values can be read and saved, but training must not go on.
            self._broken = (
                f"the deferred update of {slots[0].name} and its fusion group failed midway "
                f"({type(error).__name__}: {error})"
            )
            raise
        finally:
            for lazy in lazies:
                lazy.memory.grad = None  # frees a copy that was cast back from the wire dtype


def run_updates(pipeline: Pipeline, claimed: Mapping[Slot, DeferredUpdate]) -> None:
    """Run these updates of parameters whose gradients are complete."""
    edited = [slot for slot, update in claimed.items() if update.edits_gradient]
    runs: dict[int, tuple[DeferredUpdate, list[Slot]]] = {}  # by id: one object for each param group of a step
    for slot, update in claimed.items():
        runs.setdefault(id(update), (update, []))[1].append(slot)
    with as_if_called_by_the_user():  # also what copies gradients, which the update may write to
        gradients = pipeline.gradients.for_update(claimed, edited)
        for update, slots in runs.values():
            optimizer = update.snapshot.optimizer
            needs_alignment = not is_of_torch(optimizer)
            for slot in slots:
                gradient = gradients[slot]
                slot.lazy.memory.grad = gradient.clone() if needs_alignment and not is_aligned(gradient) else gradient
            to_update = [ToUpdate(slot.parameter, slot.lazy.memory) for slot in slots]
            together = update.foreach and not any(slot.lazy.overlaps for slot in slots)
            with guarded(optimizer, update.outside):
                for batch, settings in _batches(to_update) if together else [(to_update, _AS_SET)]:
                    update.snapshot.step({update.group: batch}, settings=settings)
        for slot in edited:
            if (grad := slot.lazy.memory.grad) is not None and grad is not gradients[slot]:
                gradients[slot].copy_(grad)


def _batches(to_update: Sequence[ToUpdate]) -> list[tuple[Sequence[ToUpdate], Mapping[str, Any]]]:
    """What to update together in turn, and how: small parameters by as many as the cache holds, then the others."""
    batches: list[tuple[Sequence[ToUpdate], Mapping[str, Any]]] = []
    others: list[ToUpdate] = []
    batch: list[ToUpdate] = []
    elements = 0
    for each in to_update:
        numel = each.memory.numel()
        if numel > _SMALL_ELEMENTS:
            others.append(each)
            continue
        if not batch or elements + numel > _BATCH_ELEMENTS:
            batch, elements = [], 0
            batches.append((batch, _TOGETHER))
        batch.append(each)
        elements += numel
    return [*batches, (others, _AS_SET)] if others else batches


def is_aligned(tensor: Tensor) -> bool:
    """Whether a tensor begins where torch would put a new one in memory; on CUDA that makes no difference here.

    BLAS adds up in another order elsewhere (seen with MKL on AMD processors), so an optimizer that multiplies gradients
    as matrices or vectors, such as Shampoo, would not have the bits of plain DDP. Torch's own do not do so themselves.
    """
    return not tensor.is_cpu or not tensor.data_ptr() % _ALIGNMENT_BYTES


def as_if_called_by_the_user() -> contextlib.AbstractContextManager[None]:
    """Leave autocast, inference mode and grad mode: a touch may happen inside them, but ``step()`` runs outside."""
    if torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES)):
        return _outside_of_all()
    return torch.no_grad()  # each update of a group comes here


@contextlib.contextmanager
def _outside_of_all() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device_type in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
