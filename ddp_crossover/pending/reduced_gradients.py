"""What a script finds in ``.grad`` after backward: a PendingGrad, until some code needs the reduced gradient.

A gradient whose memory a script keeps is delivered at the end of backward, because a later read could not be observed.
This file does not know when legs are launched: it is given a function that waits for a fusion group.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_crossover.comm.link import Link
from ddp_crossover.comm.stream_order import StreamOrder
from ddp_crossover.pending.gradient_marks import version_of
from ddp_crossover.pending.kept_gradients import KeptGradients
from ddp_crossover.pending.pending_gradient import PendingGrad, resolved
from ddp_crossover.pending.slots import Group, GroupState, Slot
from ddp_crossover.torch_internals.autograd import graph_task, is_in_backward
from ddp_crossover.torch_internals.dispatch import outside_of_modes

_OVERWRITTEN = (
    "the gradient of {} that the script took from .grad after the last forward, without reading it, was overwritten by "
    "the backward that has begun, which did not come from the model's output: read or clone gradients before a forward"
)

_ONE_FOR_TWO = (
    "the gradient of {} is that of another parameter, too, because a script has given both the same tensor "
    "(p.grad = q.grad) and a backward has added to it: with several ranks DDP then takes one for the sum of both. Give "
    "it a copy: p.grad = q.grad.clone()"
)

_EXCHANGED = (
    "a script has given {} the gradient of another parameter (p.grad = q.grad), and a backward has added to it: with "
    "gradient_as_bucket_view=True, DDP then takes each for the other's. Give it a copy: p.grad = q.grad.clone()"
)

_LOST = (
    "the gradient of {} that the script took from .grad was not read before the next backward, and is spread over the "
    "ranks (shard_optimizer=True): read or clone gradients before optimizer.step()"
)


class GradientUser(Protocol):
    """Who uses reduced gradients later than a script does: deferred updates."""

    def gradient_is_read(self, slot: Slot) -> None:
        """Called before a gradient is delivered to a reader."""

    def needs_gradient(self, slot: Slot) -> bool:
        """Whether an update that has not been applied needs this gradient."""


class ReducedGradients:
    """The gradients of one model under one plan.

    Args:
        slots: all parameters, with their places in the fusion buffers.
        link: stages gradients.
        order: orders CUDA streams.
        kept: finds gradients whose memory a script keeps.
        complete: waits until a fusion group's buffer holds the reduced gradients.
        is_overwritten: whether DDP's next backward has written into the bucket with this gradient.
        user: uses gradients later than a script does.
        answer_early: answers some torch functions without gathered gradients, see :meth:`PendingGrad.arm`; or None.
        may_leave_out: whether DDP writes no ``.grad`` of a parameter that it takes for unused on all ranks.
        in_buckets: whether DDP writes by making ``.grad`` a part of a bucket, else into the tensor that is there.

    Attributes:
        are_reduced: whether no backward can have added this rank's own gradients to those of the latest iteration, or
            put them in their place.
        were_added_to: whether a backward has added to them since.
        unassigned: parameters that have not got a gradient in this iteration: they keep the ``.grad`` that they had,
            because no rank has used them, or have this rank's own, because DDP has lost sight of them.
        is_retiring: whether the iteration is being ended, so that no reader has asked for what is delivered.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        link: Link,
        order: StreamOrder,
        kept: KeptGradients,
        complete: Callable[[Group], None],
        is_overwritten: Callable[[Slot], bool],
        user: GradientUser,
        answer_early: Callable[..., Any] | None,
        *,
        may_leave_out: bool,
        in_buckets: bool,
    ) -> None:
        self._slots = slots
        self._link = link
        self._order = order
        self._kept = kept
        self._complete = complete
        self._was_overwritten = is_overwritten
        self._user = user
        self._answer_early = answer_early
        self._may_leave_out = may_leave_out
        self._in_buckets = in_buckets
        self.are_reduced = self.were_added_to = False
        self.is_retiring = False
        self.unassigned: list[Slot] = []
        self._unfinished: Sequence[Slot] = ()  # those whose gradients may still be pending
        self._thread = 0
        # By index. Made once: every backward arms every gradient with them.
        self._delivers = [functools.partial(self._deliver, slot) for slot in slots]
        self._zeroes = [functools.partial(self._zero, slot) for slot in slots]
        self._parted_in = -1

    def drop_references(self) -> None:
        """Drop all parameters and gradients now, not at the next garbage collection."""
        self.unassigned.clear()
        self._unfinished = ()
        self._delivers.clear()
        self._zeroes.clear()

    # Backward.

    def expect_unreduced(self) -> None:
        """Note that a backward may add this rank's own gradients to what is in ``.grad``."""
        self.are_reduced = False

    def ddp_writes_next(self) -> None:
        """Note that all gradients of this rank are in ``.grad``, and that DDP is about to write the reduced ones."""
        if self._may_leave_out and not self._in_buckets:
            for slot in self._slots:
                slot.note_version(version_of(slot.parameter.grad))

    def make_pending(self, some_unused: bool, skipped: Collection[Slot]) -> list[Slot]:
        """Make every ``.grad`` a PendingGrad; return the slots of those that cannot be, because a script keeps them.

        Args:
            some_unused: whether no rank has used the parameters of some fusion group.
            skipped: parameters whose buckets DDP has left out; their ``.grad`` stays as it is.
        """
        self._thread = threading.get_ident()
        self.are_reduced = True
        self.were_added_to = False
        doubtful = []
        self.unassigned.clear()
        self._unfinished = self._slots
        seen: set[int] = set()
        for slot in self._slots:
            grad = slot.parameter.grad
            slot.reset()
            if grad is not None:
                if id(grad) in seen:
                    raise RuntimeError(_ONE_FOR_TWO.format(slot.name))
                seen.add(id(grad))
            if (
                grad is None
                or slot in skipped
                or (some_unused and all(group.state is GroupState.UNUSED for group in slot.groups))
                or (self._may_leave_out and not self._is_written(slot, grad))
            ):
                self.unassigned.append(slot)
                continue
            slot.forget_scales()
            pending = slot.pending.take(grad, is_in_bucket=self._in_buckets)
            if self._kept.excess(grad):
                self._link.finish_staging()  # staging jobs hold references to DDP's buckets, which count here
                if self._kept.excess(grad):
                    doubtful.append(slot)
                    continue
            self._make_one_pending(slot, grad, pending)
        del grad  # this local name would count as a reference in _kept_among()
        return self._kept_among(doubtful) if doubtful else []

    def _is_written(self, slot: Slot, grad: Tensor) -> bool:
        """Whether DDP has written this ``.grad``, which may be this rank's own gradient of a parameter unseen by it."""
        if self._in_buckets:
            return type(grad) is PendingGrad or self._kept.is_in_bucket(grad)
        return version_of(grad) != slot.version_before

    def _kept_among(self, doubtful: list[Slot]) -> list[Slot]:
        for slot, is_kept in zip(doubtful, self._kept.kept([slot.parameter for slot in doubtful]), strict=True):
            slot.note_kept(is_kept)
            if not is_kept:
                assert slot.parameter.grad is not None
                self._make_one_pending(slot, slot.parameter.grad, slot.pending.current)
        return [slot for slot in doubtful if slot.is_kept]

    def _make_one_pending(self, slot: Slot, grad: Tensor, pending: PendingGrad) -> None:
        memory = resolved(grad)
        if self._in_buckets:
            self._require_own_place(slot, memory)
        slot.note_memory(memory)
        deliver, zero = self._delivers[slot.index], self._zeroes[slot.index]
        pending.arm(deliver, memory, zero, self._answer_early, self._note_sum)
        if pending is not grad:
            slot.parameter.grad = pending

    def _require_own_place(self, slot: Slot, memory: Tensor) -> None:
        """Refuse a ``.grad`` that is the part of a bucket where DDP has the gradient of another parameter."""
        is_elsewhere = memory.numel() and memory.data_ptr() != slot.address
        if is_elsewhere and self._kept.is_in_bucket(memory):
            raise RuntimeError(_EXCHANGED.format(slot.name))

    def _note_sum(self) -> None:
        self.are_reduced = False
        self.were_added_to = True
        # Before DDP has replaced any `.grad` in this backward. Under the next plan, what this one has armed may still
        # be there, and the slots are gone.
        if self._slots and (task := graph_task()) != self._parted_in:
            self._parted_in = task
            self._part_exchanged()

    def _part_exchanged(self) -> None:
        """Keep apart what a script has put into the ``.grad`` of other parameters, to which a backward may add.

        It belongs to that parameter from now on. With bucket views DDP then writes the sum where the gradient of that
        parameter belongs: it does not see that a PendingGrad is a part of a bucket; of a plain gradient it does, and
        leaves it where it is.
        """
        away = [slot for slot in self._slots if slot.parameter.grad is not slot.pending.current]
        elsewhere = {id(slot.parameter.grad) for slot in away}
        for slot in away:
            exchanged = slot.pending.current
            if id(exchanged) in elsewhere and not exchanged.is_free:
                if self._in_buckets:
                    exchanged.move()
                else:
                    exchanged.resolve()
                slot.pending.part()

    def deliver_kept(self, slot: Slot) -> None:
        """Wait for a gradient whose memory a script keeps, and put it there."""
        grad = slot.parameter.grad
        assert grad is not None
        for group in slot.neighbours or slot.groups:
            self._complete(group)
        memory = resolved(grad)
        if self._in_buckets:
            self._require_own_place(slot, memory)
        self._copy_out(slot, memory)
        if self._answer_early is not None and memory is grad:
            # Another rank, whose script does not keep it, may call `answer_early`: so must this one.
            pending = slot.pending.current
            pending.arm(_itself, memory, self._zeroes[slot.index], self._answer_early, self._note_sum)
            pending.resolve()
            slot.parameter.grad = pending

    # Readers of `.grad`, and the optimizer.

    def is_pending(self, slot: Slot) -> bool:
        """Whether the parameter's ``.grad`` is a PendingGrad that no code has read or set to zero yet."""
        pending = slot.pending.current
        return pending.is_reduced_gradient and slot.parameter.grad is pending

    def is_reduced(self, slot: Slot) -> bool:
        """Whether the parameter's ``.grad`` has come from the latest iteration, and no backward has added to it."""
        return self.are_reduced and slot.parameter.grad is slot.pending.current and slot not in self.unassigned

    def _deliver(self, slot: Slot, memory: Tensor) -> Tensor:
        if slot.pending.current.becomes_zero and slot.is_spread:
            # Not gathered for this: each rank gets here at another place, or not at all, as its own references tell.
            return torch.empty_like(memory)
        if not self.is_retiring:
            self._user.gradient_is_read(slot)
            if slot.pending.current.resolved:  # for an update that changes it as well
                return slot.pending.current.resolve()
        # A script that has got a part of a bucket may move the storage of all of it.
        for group in slot.groups_to_await:
            self._complete(group)
        if slot.is_shared and not slot.scales:
            if slot.pending.current.becomes_zero and self._user.needs_gradient(slot):
                return torch.empty_like(memory)  # the zeros would overwrite what an update is about to read
            return memory  # it is a part of the fusion buffer
        if slot.is_shared:
            memory = torch.empty_like(memory)  # the factors belong to the update, too
        elif slot.parameter.grad is not slot.pending.current:
            if self._was_overwritten(slot):
                raise RuntimeError(_OVERWRITTEN.format(slot.name))
            if self._is_overwritten(memory):
                return memory
            if not self._may_fill(memory):
                memory = torch.empty_like(memory)
        outside_of_modes(functools.partial(self._copy_out, slot, memory))
        return memory

    def _zero(self, slot: Slot, memory: Tensor) -> bool:
        """Set the memory of a pending gradient to zero; False if it is a part of a fusion buffer that is still used."""
        if slot.is_shared:
            if self._user.needs_gradient(slot) or slot.is_spread:
                return False
            for group in slot.neighbours:
                self._complete(group)  # protects the zeros from the gather leg, which writes there, too
        self._link.finish_staging()  # protects this rank's own gradient, which may not have been copied yet
        memory.zero_()
        return True

    def _is_overwritten(self, memory: Tensor) -> bool:
        """Whether DDP's next gradient is in ``memory`` already; plain DDP overwrites kept gradients, too."""
        return self.is_retiring and is_in_backward() and self._kept.is_in_bucket(memory)

    def _may_fill(self, memory: Tensor) -> bool:
        """Whether a gradient no longer in ``.grad`` may be delivered into DDP's bucket: not if backward may use it."""
        is_in_training = is_in_backward() or threading.get_ident() != self._thread
        return self._kept.is_in_bucket(memory) and not is_in_training

    @torch.no_grad()
    def _copy_out(self, slot: Slot, memory: Tensor) -> None:
        value = slot.view
        if not slot.scales and value.data_ptr() == memory.data_ptr():
            return
        for factor in slot.scales:  # not in place: a signal handler may interrupt this loop and run it, too
            self._order.keep(factor)
            [value] = torch._foreach_mul([value.to(memory.dtype)], factor)
        memory.copy_(value)
        self._order.publish()

    def abandon(self) -> None:
        """Have reads of all gradients that are pending raise."""
        for slot in self._slots:
            if self.is_pending(slot):
                slot.pending.current.abandon(_LOST.format(slot.name))

    def deliver(self) -> None:
        """Wait for every gradient that is pending."""
        for slot in self._slots:
            if self.is_pending(slot):
                slot.pending.current.resolve()

    def unwrap(self) -> bool:
        """Replace every PendingGrad in ``.grad`` by its reduced gradient; returns whether any was pending."""
        is_any_pending = any(map(self.is_pending, self._slots))
        unwrap_gradients(slot.parameter for slot in self._slots)
        return is_any_pending

    def gather_spread(self) -> None:
        """Gather what is spread over the ranks and still in ``.grad``, before backward adds to it.

        To gather it then would overwrite buckets that backward has written into.
        """
        # One that becomes zero is not gathered. No other groups: on another rank a backward under no_sync() may have
        # needed these gradients before, and has asked nobody about others.
        for slot in filter(self.is_pending, self._slots):
            if slot.is_spread:
                for group in slot.groups_to_await:
                    self._complete(group)

    def finish(self, *, leave_in_grad: bool = False) -> None:
        """Deliver gradients that a script still refers to and drop the rest, before backward writes into the buckets.

        Args:
            leave_in_grad: leave those that are still in ``.grad``, which backward asks for before it overwrites them.

        Raises:
            RuntimeError: if a gradient that a script holds may have been overwritten.
        """
        self.is_retiring = True
        left = []
        try:
            for slot in self._unfinished:
                pool = slot.pending  # no local name for the PendingGrad: held_elsewhere() would count it
                if pool.current.resolved:
                    continue
                if slot.parameter.grad is pool.current:
                    if leave_in_grad and not slot.is_shared:
                        left.append(slot)
                    else:
                        pool.current.resolve()
                elif not pool.held_elsewhere():
                    pool.current.disarm()
                elif slot.is_spread:
                    pool.current.abandon(_LOST.format(slot.name))
                else:
                    pool.current.resolve()
            self._unfinished = left
        finally:
            self.is_retiring = False


def unwrap_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace every PendingGrad in ``.grad`` by its reduced gradient, after a wait if it is pending."""
    for parameter in parameters:
        if isinstance(grad := parameter.grad, PendingGrad):
            parameter.grad = grad.resolve()


def _itself(memory: Tensor) -> Tensor:
    return memory
