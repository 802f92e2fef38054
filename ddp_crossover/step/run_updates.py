"""How deferred updates run once their gradients are complete: with which tensors, and in which batches."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_crossover.comm.stream_order import StreamOrder
from ddp_crossover.dear import Pipeline
from ddp_crossover.pending.slots import Slot
from ddp_crossover.watching.optimizer_snapshot import OptimizerSnapshot, ToUpdate
from ddp_crossover.watching.outside_settings import Outside
from ddp_crossover.watching.surroundings import AUTOCAST_DEVICES
from ddp_crossover.watching.update_guard import guarded

_ALIGNMENT_BYTES = 64  # of torch's own memory on CPU

# On CPU a call of a kernel costs more than its arithmetic up to some thousand elements. An optimizer goes over a batch
# about ten times, which stays in the cache meanwhile, with its gradients and state.
_SMALL_ELEMENTS = 2**12
_BATCH_ELEMENTS = 2**16
_TOGETHER: Mapping[str, Any] = {"foreach": True}
_AS_SET: Mapping[str, Any] = {}


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


def run_updates(pipeline: Pipeline, claimed: Mapping[Slot, DeferredUpdate]) -> None:
    """Run these updates of parameters whose gradients are complete."""
    edited = [slot for slot, update in claimed.items() if update.edits_gradient]
    runs: dict[int, tuple[DeferredUpdate, list[Slot]]] = {}  # by id: one object for each param group of a step
    for slot, update in claimed.items():
        runs.setdefault(id(update), (update, []))[1].append(slot)
    with as_if_called_by_the_user():  # also what copies gradients, which the update may write to
        gradients = _gradients(claimed, edited, pipeline.order)
        for update, slots in runs.values():
            needs_alignment = not update.snapshot.is_of_torch
            for slot in slots:
                gradient = gradients[slot]
                slot.lazy.memory.grad = gradient.clone() if needs_alignment and not is_aligned(gradient) else gradient
            to_update = [ToUpdate(slot.parameter, slot.lazy.memory) for slot in slots]
            together = update.foreach and not any(slot.lazy.overlaps for slot in slots)
            with guarded(update.snapshot, update.outside):
                for batch, settings in _batches(to_update) if together else [(to_update, _AS_SET)]:
                    update.snapshot.step({update.group: batch}, settings=settings)
        for slot in edited:
            if (grad := slot.lazy.memory.grad) is not None and grad is not gradients[slot]:
                gradients[slot].copy_(grad)


def _gradients(slots: Iterable[Slot], edited: Collection[Slot], order: StreamOrder) -> dict[Slot, Tensor]:
    """Return complete gradients in their parameters' dtype, times the factors of clipping and loss scaling.

    Gradients that were sent in that dtype are multiplied in place; the others are cast copies. Call it outside of
    inference mode, whose tensors are useless to the optimizer.

    Args:
        slots: the parameters.
        edited: those whose update changes the gradient, too, which later readers of ``.grad`` see.
        order: orders CUDA streams.
    """
    shown = {
        slot: slot.pending.current.resolve()
        for slot in edited
        if slot.is_cast and slot.pending.current.is_reduced_gradient
    }
    gradients = {
        slot: shown[slot] if slot in shown else slot.view.to(slot.parameter.dtype) if slot.is_cast else slot.view
        for slot in slots
    }
    by_factors: dict[tuple[int, ...], list[Slot]] = {}
    for slot in gradients:
        if slot.scales and slot not in shown:
            by_factors.setdefault(tuple(map(id, slot.scales)), []).append(slot)
    for alike in by_factors.values():
        for factor in alike[0].scales:
            order.keep(factor)
            torch._foreach_mul_([gradients[slot] for slot in alike], factor)
        for slot in alike:
            if not slot.is_cast:
                slot.forget_scales()
    return gradients


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
    """Leave autocast, inference mode and grad mode: a touch may happen inside them.

    An update finds those of ``step()`` again, see ``Surroundings``.
    """
    if torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES)):
        return _outside_of_all()
    return torch.no_grad()  # each update of a group comes here


@contextlib.contextmanager
def _outside_of_all() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device_type in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
