"""The DeAR pipeline: scatter legs during backward, gather legs during the next forward.

A pipeline owns the fusion buffers of one plan and follows each gradient from DDP's bucket to the optimizer update:
staged, scattered, gathered, delivered to readers of ``.grad``, applied. It decides when each leg is launched and which
code waits for it. It does not know DDP's hook contract (``ddp.reducer``) or how updates are computed (``optim``).

Source: DeAR, arXiv 2302.12445, section III. Unlike in the paper, gather legs carry gradients, not parameters, so they
need no optimizer and may start before ``step()``.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import record_function

from ddp_crossover.collectives.leg import HostWait
from ddp_crossover.collectives.link import Link
from ddp_crossover.collectives.stream_order import StreamOrder
from ddp_crossover.collectives.wire import scale_into, travels_as
from ddp_crossover.fusion import FusionGroup, FusionPlan, gathers_behind_scatters, order_of_use
from ddp_crossover.fusion_buffers.staging import Staging, gradient_stride, plan_staging, same_objects
from ddp_crossover.gpu_sharing.turns import Turns
from ddp_crossover.parameters.kept_gradients import KeptGradients
from ddp_crossover.parameters.pending_gradient import PendingGrad
from ddp_crossover.parameters.slots import GroupInFlight, Slot
from ddp_crossover.torch_internals import allow_foreach, is_in_backward, is_traced, outside_of_modes

_SPARE_NUMEL = 2**14
# Receives of scatter legs are posted this many legs ahead, so that a faster rank can send. Each one costs memory.
_EXPECTED_LEGS = 4


class Phase(enum.Enum):
    """State of one iteration. After an error in any phase, the next backward starts from IDLE."""

    IDLE = "nothing staged"  # -> BACKWARD: the first bucket arrives
    BACKWARD = "buckets arrive, scatter legs leave"  # -> REDUCED: end of backward; -> IDLE: backward raised
    REDUCED = "gather legs are out, .grad is pending"  # -> IDLE: the next backward retires everything


class Pipeline:
    """Runs all fusion groups of one model under one plan.

    Args:
        plan: which gradient travels in which group.
        parameters: named parameters, in the plan's numbering.
        link: runs the legs.
        turns: notified of waits, so that another job may compute meanwhile.
        kept: finds gradients whose memory a script keeps.
        lock: held while gradients are delivered and updates applied, from any thread.
        memory: arenas of the previous plan, reused where they are large enough.
        wire_dtype: dtype to which wider gradients are cast in the fusion buffers; None keeps every gradient's dtype.
        every_group_arrives: False if DDP may leave out buckets.
        unwritten_is_unused: if DDP does not write a ``.grad`` at the end of backward, no rank has used its
            parameter, and the ``.grad`` stays as it is.
    """

    def __init__(
        self,
        plan: FusionPlan,
        parameters: Sequence[tuple[str, Parameter]],
        link: Link,
        turns: Turns,
        kept: KeptGradients,
        *,
        lock: threading.RLock | None = None,
        memory: Mapping[str, Tensor] = MappingProxyType({}),
        wire_dtype: torch.dtype | None = None,
        every_group_arrives: bool = True,
        unwritten_is_unused: bool = False,
    ) -> None:
        self.every_group_arrives = every_group_arrives
        self.unwritten_is_unused = unwritten_is_unused
        self.plan = plan
        self.link = link
        self.turns = turns
        self.order = StreamOrder(link.streams)
        self.phase = Phase.IDLE
        self.iteration = 0
        self.lock = lock or threading.RLock()
        # Deferred optimizer work per slot, opaque to the pipeline. `apply_updates` removes each entry that it applies.
        self.updates: dict[Slot, object] = {}
        self.apply_updates: Callable[[list[Slot]], None] = _no_updates
        self.on_gradient_read: Callable[[Slot], None] = _nobody_minds
        self._is_retiring = False
        self._kept = kept
        self._thread = 0
        self._gathers_early = plan.schedule == "auto"
        self._urgency = {group: place for place, group in enumerate(plan.use_order)}
        # If the link needs one launch order on all ranks, the plan says which gather legs go between scatter legs.
        self._followers = {} if link.orders_gathers else gathers_behind_scatters(plan)
        self._inverse_world_size = 1.0 / link.world_size
        self._stagings: dict[int, Staging] = {}
        self._arrived: list[Staging] = []
        self._announced: set[int] = set()

        arena_of = {p.parameter: group.arena for group in plan.groups for p in group.pieces}
        like = {arena: parameters[index][1] for index, arena in arena_of.items()}
        self._arenas = {
            arena: _zeros(numel, travels_as(like[arena].dtype, wire_dtype), like[arena].device, memory.get(arena))
            for arena, numel in plan.arena_numel.items()
        }
        link.use_arenas(self._arenas.values())
        allow_foreach(PendingGrad)
        self.slots = [
            Slot(
                index,
                name,
                parameter,
                self._arenas[arena_of[index]].as_strided(
                    parameter.shape, gradient_stride(parameter), plan.offsets[index]
                ),
                self.lock,
            )
            for index, (name, parameter) in enumerate(parameters)
        ]
        for slot in self.slots:
            slot.deliver = functools.partial(self._deliver, slot)
        self.slot_of: dict[Tensor, Slot] = {slot.parameter: slot for slot in self.slots}
        self.groups = [self._group(spec) for spec in plan.groups]

    def _group(self, spec: FusionGroup) -> GroupInFlight:
        buffer = self._arenas[spec.arena].narrow(0, spec.offset, spec.numel)
        group = GroupInFlight(spec, buffer, [self.slots[p.parameter] for p in spec.pieces])
        for slot in group.slots:
            slot.groups.append(group)
        return group

    def follow(self, use_rank: Sequence[int]) -> None:
        """Gather in the forward's new use order from now on, if the link allows a different order on each rank."""
        if self.link.orders_gathers:
            order = order_of_use(self.plan.groups, use_rank)
            self._urgency = {group: place for place, group in enumerate(order)}

    # Backward.

    def begin_backward(self) -> None:
        """Reset all groups for the next iteration and announce its first scatter legs."""
        assert self.phase is Phase.IDLE
        for group in self.groups:
            group.missing = len(group.spec.pieces)
            group.scatter = group.gather = None
            group.complete = False
        self._arrived.clear()
        self._announced.clear()
        self._kept.forget_buckets()
        self.iteration += 1
        self.phase = Phase.BACKWARD
        for index in range(_EXPECTED_LEGS):
            self._expect(index)

    def stage(
        self, index: int, buffer: Tensor, parameters: list[Tensor], gradients: Callable[[], list[Tensor]]
    ) -> None:
        """Copy one DDP bucket into the fusion buffers and launch the scatter legs of groups that became complete.

        Args:
            index: the bucket's index.
            buffer: the bucket's gradients, flat, in their own dtype; not modified.
            parameters: the bucket's parameters.
            gradients: returns the bucket's gradients as views of ``buffer``; called only if the bucket has changed.
        """
        staging = self._stagings.get(index)
        if staging is None or not same_objects(staging.parameters, parameters):
            staging = self._stagings[index] = plan_staging(
                buffer, [self.slot_of[p] for p in parameters], parameters, gradients(), self._arenas
            )
        self.link.stage(functools.partial(self._copy, buffer, staging.copies))
        self._arrived.append(staging)
        self._kept.note_bucket(buffer, len(parameters))
        if self.unwritten_is_unused:
            for slot in staging.slots:
                slot.version_before = _version(slot.parameter.grad)
        for group, pieces in staging.arrivals:
            group.missing -= pieces
            if not group.missing:
                self._launch(group)

    @torch.no_grad()
    def _copy(self, buffer: Tensor, copies: list[tuple[int, int, Tensor]]) -> None:
        self.order.join()
        for low, high, target in copies:
            scale_into(target, buffer[low:high], self._inverse_world_size)
        self.order.mark()

    def _launch(self, group: GroupInFlight) -> None:
        index = group.spec.index
        self._expect(index + _EXPECTED_LEGS)
        if not group.spec.split:
            group.scatter = group.gather = self.link.all_reduce_leg(index, group.buffer)
        else:
            group.scatter = self.link.reduce_scatter(index, group.buffer)
            if self._gathers_early and self.link.orders_gathers:
                group.gather = self.link.all_gather(group.scatter, self._urgency[index])
        for follower in self._followers.get(index, ()):
            self._gather(self.groups[follower])

    def _expect(self, index: int) -> None:
        if self.every_group_arrives and index < len(self.groups) and self.groups[index].scatter is None:
            self._announced.add(index)
            self.link.announce(index, self.groups[index].buffer)

    def end_backward(self) -> None:
        """Launch the gather legs in use order and make every ``.grad`` a PendingGrad unless a script keeps it."""
        self.order.join()
        self._complete_partly_staged_groups()
        for group in self.groups:
            group.complete = group.scatter is None
        self._gather_in_use_order()
        self.link.end_scatter_legs()
        self._thread = threading.get_ident()
        with self.lock:
            kept = self._make_gradients_pending()
            self.phase = Phase.REDUCED
            for slot in kept:
                self._deliver_to_keeper(slot)

    def _make_gradients_pending(self) -> list[Slot]:
        """Make gradients pending; return the slots of those that cannot be, because a script keeps their memory."""
        doubtful = []
        some_idle = any(group.scatter is None for group in self.groups)
        for slot in self.slots:
            grad = slot.parameter.grad
            slot.is_kept = False
            if grad is None or (some_idle and all(group.scatter is None for group in slot.groups)):
                continue
            if self.unwritten_is_unused and _version(grad) == slot.version_before:
                continue
            slot.scales = ()
            pending = slot.pending.take(grad)
            if self._kept.excess(grad):
                self.link.finish_staging()  # staging jobs hold references to DDP's buckets, which count here
                if self._kept.excess(grad):
                    doubtful.append(slot)
                    continue
            self._make_gradient_pending(slot, grad, pending)
        del grad  # this local name would count as a reference in _kept_among()
        return self._kept_among(doubtful) if doubtful else []

    def _kept_among(self, doubtful: list[Slot]) -> list[Slot]:
        for slot, is_kept in zip(doubtful, self._kept.kept([slot.parameter for slot in doubtful]), strict=True):
            slot.is_kept = is_kept
            if not is_kept:
                assert slot.parameter.grad is not None
                self._make_gradient_pending(slot, slot.parameter.grad, slot.pending.current)
        return [slot for slot in doubtful if slot.is_kept]

    def _make_gradient_pending(self, slot: Slot, grad: Tensor, pending: PendingGrad) -> None:
        memory = grad.resolve() if type(grad) is PendingGrad else grad
        pending.arm(slot.deliver, memory, self.link.finish_staging)
        if pending is not grad:
            slot.parameter.grad = pending

    def _deliver_to_keeper(self, slot: Slot) -> None:
        grad = slot.parameter.grad
        assert grad is not None
        for group in slot.groups:
            self.complete(group)
        self._copy_out(slot, grad.resolve() if isinstance(grad, PendingGrad) else grad)

    def _gather_in_use_order(self) -> None:
        for index in self.plan.use_order:
            self._gather(self.groups[index])

    def _gather(self, group: GroupInFlight) -> None:
        if group.scatter is not None and group.gather is None:
            group.gather = self.link.all_gather(group.scatter)

    def _complete_partly_staged_groups(self) -> None:
        """Launch groups for which DDP skipped a bucket, which no rank has used, with zeros for its gradients."""
        arrived: set[Slot] | None = None
        for group in self.groups:
            if 0 < group.missing < len(group.spec.pieces):
                arrived = arrived or {slot for s in self._arrived for slot in s.slots}
                for slot in group.slots:
                    if slot not in arrived:
                        slot.view.zero_()
                self._launch(group)

    # Forward, and other code that needs a result.

    def is_pending(self, slot: Slot) -> bool:
        """Whether the parameter's ``.grad`` is a PendingGrad that no code has read yet."""
        pending = slot.pending.current
        return not pending.resolved and slot.parameter.grad is pending

    def catch_up(self, slots: Iterable[Slot]) -> None:
        """Apply the pending updates of these parameters and of the others in their fusion groups."""
        with self.lock:
            self.order.join()
            if not self.updates:
                return
            groups = dict.fromkeys(group for slot in slots if slot in self.updates for group in slot.groups)
            # Wait for all groups before the first update: a leg that fails must not leave only some of them updated.
            for group in groups:
                self.complete(group)
            # Update group by group: gradients cast back to the parameters' dtype never take more than one group.
            for group in groups:
                due = [s for s in group.slots if s in self.updates and all(part.complete for part in s.groups)]
                if due:
                    outside_of_modes(functools.partial(self._apply, due), self.link.current_stream())

    def flush(self) -> None:
        """Apply all pending updates."""
        self.catch_up(self.slots)

    def _apply(self, slots: list[Slot]) -> None:
        self.turns.resume()
        begin = self.link.clock.mark()
        self.apply_updates(slots)
        self.link.clock.span("update", begin)
        self.order.mark()

    def complete(self, group: GroupInFlight) -> None:
        """Wait until the group's buffer holds the reduced gradients."""
        self.order.join()
        if not group.complete:
            assert group.gather is not None
            index = group.spec.index
            # No profiler range if the leg is done, where it only costs time, or if `torch.jit.trace` would record it.
            unnamed = group.gather.is_done() or is_traced()
            named = contextlib.nullcontext() if unnamed else record_function(f"ddp_crossover::wait[{index}]")
            with named, self.waiting(index) as host_wait:
                # Protects the optimizer and readers of `.grad` from partly gathered gradients.
                group.gather.wait(host_wait)
            group.complete = True

    def waiting(self, what: int | str) -> contextlib.AbstractContextManager[HostWait | None]:
        """Context of a wait for communication; ``what`` identifies the same wait in each step, see :class:`Turns`."""
        return self.turns.gap(what)

    def _deliver(self, slot: Slot, memory: Tensor) -> Tensor:
        if not self._is_retiring:
            self.on_gradient_read(slot)
        for group in slot.groups:
            self.complete(group)
        if slot.parameter.grad is not slot.pending.current:
            if self._is_overwritten(memory):
                return memory
            if not self._may_fill(memory):
                memory = torch.empty_like(memory)
        outside_of_modes(functools.partial(self._copy_out, slot, memory), self.link.current_stream())
        return memory

    def _is_overwritten(self, memory: Tensor) -> bool:
        """Whether DDP's next gradient is in ``memory`` already; plain DDP overwrites kept gradients, too."""
        return self._is_retiring and is_in_backward() and self._kept.is_in_bucket(memory)

    def _may_fill(self, memory: Tensor) -> bool:
        """Whether a gradient no longer in ``.grad`` may be delivered into DDP's bucket: not if backward may use it."""
        is_in_training = is_in_backward() or threading.get_ident() != self._thread
        return self._kept.is_in_bucket(memory) and not is_in_training

    @torch.no_grad()
    def _copy_out(self, slot: Slot, memory: Tensor) -> None:
        value = slot.view
        for factor in slot.scales:  # not in place: a signal handler may interrupt this loop and run it, too
            self.order.keep(factor)
            [value] = torch._foreach_mul([value.to(memory.dtype)], factor)
        memory.copy_(value)
        self.order.mark()

    @torch.inference_mode(False)  # a touch during evaluation would make inference tensors, useless to the optimizer
    def reduced(self, slots: Iterable[Slot]) -> dict[Slot, Tensor]:
        """Return complete gradients in their parameters' dtype, times the factors of clipping and loss scaling.

        Gradients that were sent in that dtype are multiplied in place; the others are cast copies.
        """
        reduced = {slot: slot.view.to(slot.parameter.dtype) if slot.is_cast else slot.view for slot in slots}
        by_factors: dict[tuple[int, ...], list[Slot]] = {}
        for slot in reduced:
            if slot.scales:
                by_factors.setdefault(tuple(map(id, slot.scales)), []).append(slot)
        for alike in by_factors.values():
            for factor in alike[0].scales:
                self.order.keep(factor)
                torch._foreach_mul_([reduced[slot] for slot in alike], factor)
            for slot in alike:
                if not slot.is_cast:
                    slot.scales = ()
        return reduced

    def retire(self) -> None:
        """End the iteration: finish its updates, gradients and legs before its buffers are filled again."""
        if self.phase is not Phase.IDLE:
            with self.lock:
                self._retire()

    def _retire(self) -> None:
        self._is_retiring = True
        try:
            self._finish_updates_and_gradients()
        finally:
            self._is_retiring = False
        if self.phase is Phase.BACKWARD and not self.link.is_closed:
            self._close_broken_backward()
        with self.waiting("end of iteration") as host_wait:
            for group in self.groups:
                if group.gather is not None:
                    # Protects peers that still receive from this buffer.
                    group.gather.wait(host_wait)
        self.phase = Phase.IDLE

    def _finish_updates_and_gradients(self) -> None:
        self.flush()
        if self.phase is Phase.REDUCED:
            for slot in self.slots:
                pool = slot.pending  # no local name for the PendingGrad: held_elsewhere() would count it
                if pool.current.resolved:
                    continue
                if slot.parameter.grad is pool.current or pool.held_elsewhere():
                    pool.current.resolve()
                else:
                    pool.current.disarm()

    def _close_broken_backward(self) -> None:
        """Complete the announced legs of a backward that raised on all ranks, so that no receive stays open.

        The values that they carry do not matter.
        """
        self.link.finish_staging()
        for index in sorted(self._announced):
            group = self.groups[index]
            if group.scatter is None:
                group.scatter = self.link.reduce_scatter(index, group.buffer)
        self._gather_in_use_order()

    def release(self) -> dict[str, Tensor]:
        """Return the arenas by name, for the next plan's pipeline. This pipeline must not be used again."""
        assert self.phase is Phase.IDLE
        return {name: arena._base if arena._base is not None else arena for name, arena in self._arenas.items()}

    def let_go(self) -> None:
        """Drop all parameters and fusion buffers now, not at the next garbage collection. Ends the pipeline."""
        for slot in self.slots:
            del slot.parameter, slot.view, slot.pending
        for group in self.groups:
            del group.buffer, group.scatter, group.gather
        for held in (self.slots, self.slot_of, self.groups, self._arenas, self._stagings, self._arrived):
            held.clear()

    def unwrap_gradients(self) -> bool:
        """Replace every PendingGrad in ``.grad`` by its reduced gradient; returns whether any was pending."""
        pending = [slot for slot in self.slots if self.is_pending(slot)]
        for slot in self.slots:
            if isinstance(grad := slot.parameter.grad, PendingGrad):
                slot.parameter.grad = grad.resolve()
        return bool(pending)


def _zeros(numel: int, dtype: torch.dtype, device: torch.device, memory: Tensor | None) -> Tensor:
    """Return ``numel`` flat zeros, in ``memory`` if that is large enough."""
    if memory is not None and memory.numel() >= numel:
        return memory[:numel].zero_()
    # Plans differ in their padding: the spare elements let the next plan's arena fit in the same memory.
    return torch.zeros(numel + _SPARE_NUMEL, dtype=dtype, device=device)[:numel]


def _no_updates(slots: list[Slot]) -> None:
    assert not slots


def _nobody_minds(slot: Slot) -> None:
    pass


def _version(grad: Tensor | None) -> int:
    # Read the version of the `.grad` object itself: DDP's writes through a PendingGrad count there.
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if grad is None else grad._version
