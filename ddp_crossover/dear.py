"""The DeAR pipeline: scatter legs during backward, gather legs during the next forward.

A pipeline owns the fusion buffers of one plan and follows each gradient from DDP's bucket to the optimizer update:
staged, scattered, gathered, delivered to readers of ``.grad``, applied. It decides when each scatter leg is launched,
``gathers`` when each gather leg is; ``pending_updates`` waits for gather legs and has updates applied. Of DDP it knows
buckets, not who calls the hook and when (``hook.reducer``), nor how updates are computed (``step``).

Source: DeAR, arXiv 2302.12445, section III. Unlike in the paper, gather legs carry gradients, not parameters, so they
need no optimizer and may start before ``step()``. What else they may carry, and when they leave, ``gathers`` says.

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from ddp_crossover.comm.link import Link
from ddp_crossover.comm.stream_order import StreamOrder
from ddp_crossover.comm.sums import RankWeights, scale_into
from ddp_crossover.comm.wire import Wire
from ddp_crossover.compute_waits import ComputeWaits
from ddp_crossover.fusion import FusionPlan
from ddp_crossover.pending.kept_gradients import KeptGradients
from ddp_crossover.pending.lazy_param import LazyParam
from ddp_crossover.pending.reduced_gradients import GradientUser, ReducedGradients
from ddp_crossover.pending.slots import Group, Slot
from ddp_crossover.pipeline.announcements import legs_ahead
from ddp_crossover.pipeline.codes import Codes
from ddp_crossover.pipeline.gathers import GatherOrder, Gathers
from ddp_crossover.pipeline.layout import Layout
from ddp_crossover.pipeline.pending_updates import GatherWaits, PendingUpdates
from ddp_crossover.pipeline.staging import ArrivedBuckets
from ddp_crossover.torch_internals.autograd import is_in_backward
from ddp_crossover.torch_internals.ddp import GradBucket


class Updater(GradientUser, Protocol):
    """Runs the updates of a pipeline's parameters, some of which wait for gradients."""

    def apply(self, slots: list[Slot]) -> None:
        """Run those of these parameters, whose reduced gradients are complete, and take them out of ``updates``."""

    def early_answer(self, pipeline: Pipeline) -> Callable[..., Any] | None:
        """Return what answers torch functions without gathered gradients, see :meth:`PendingGrad.arm`; or None."""

    def gathers(self, pipeline: Pipeline, memory: Mapping[str, Tensor]) -> Gathers:
        """Return what the gather legs of a new pipeline carry, with memory of the previous plan's."""


class Phase(enum.Enum):
    """State of one iteration. After an error in any phase, the next backward starts from IDLE."""

    IDLE = "nothing staged"  # -> BACKWARD: the first bucket arrives
    BACKWARD = "buckets arrive, scatter legs leave"  # -> REDUCED: end of backward; -> IDLE: backward raised
    REDUCED = "gather legs are out, .grad is pending"  # -> IDLE: the next backward retires everything


@final
class Pipeline:
    """Runs all fusion groups of one model under one plan.

    Args:
        plan: which gradient travels in which group.
        params: the parameters, in the plan's numbering.
        link: runs the legs.
        compute_waits: what waits of compute go through.
        updater: runs updates, and knows what gather legs carry for them; it makes entries in ``updates``.
        kept: finds gradients whose memory a script keeps.
        lock: held while gradients are delivered and updates applied, from any thread.
        memory: arenas of the previous plan, reused where they are large enough.
        wire: what gradients are on the wire.
        weights: what each rank's gradients are multiplied by; it changes between iterations.
        codes: what travels as codes.
        owners: the ranks that reduce whole gradients, by index of the parameter; ranks share all others.
        every_group_arrives: False if DDP may leave out buckets.
        may_leave_out: whether DDP writes no ``.grad`` of a parameter that it takes for unused on all ranks.
        in_buckets: whether DDP writes by making ``.grad`` a part of a bucket.

    Attributes:
        layout: where gradients lie.
        gather_order: the order in which gather legs leave.
        gathers: what gather legs carry.
        waits: waits for gather legs.
        updates: the updates that are pending.
        awaits_backward: whether a forward has ended whose backward has not begun.
    """

    is_pipelined = True

    def __init__(
        self,
        plan: FusionPlan,
        params: Sequence[LazyParam],
        link: Link,
        compute_waits: ComputeWaits,
        updater: Updater,
        kept: KeptGradients,
        *,
        lock: threading.RLock,
        memory: Mapping[str, Tensor],
        wire: Wire,
        weights: RankWeights,
        codes: Codes,
        owners: Mapping[int, int],
        every_group_arrives: bool,
        may_leave_out: bool,
        in_buckets: bool,
    ) -> None:
        self._every_group_arrives = every_group_arrives
        self._may_leave_out = may_leave_out
        self.plan = plan
        self.link = link
        self.compute_waits = compute_waits
        self.order = StreamOrder(link.streams)
        self.phase = Phase.IDLE
        self.iteration = 0
        self.lock = lock
        self._weights = weights
        self._kept = kept
        self.awaits_backward = False

        self.device = params[0].parameter.device
        self._codes = codes.steps(plan, self.order)
        self.layout = Layout(
            plan,
            params,
            link,
            lock,
            memory=memory,
            wire=wire,
            weights=weights,
            codes=self._codes,
            owners=owners,
            every_group_arrives=every_group_arrives,
        )
        self.slots, self.groups = self.layout.slots, self.layout.groups
        self.waits = GatherWaits(self.order, compute_waits, self.groups, self.device)
        arenas = self.layout.arenas
        self._codes.use(arenas)
        link.use_arenas(arenas.values())
        self.gradients = ReducedGradients(
            self.slots,
            link,
            self.order,
            kept,
            self.complete,
            self._is_overwritten,
            updater,
            updater.early_answer(self),
            may_leave_out=may_leave_out,
            in_buckets=in_buckets,
        )
        self.slot_of: dict[Tensor, Slot] = {slot.parameter: slot for slot in self.slots}
        self._buckets = ArrivedBuckets(self.slot_of, arenas)
        self.gather_order = GatherOrder(plan, link, self.groups)
        self.updates = PendingUpdates(
            updater.apply, self.waits, self.gather_order, link, self.order, compute_waits, lock
        )
        self.gathers = updater.gathers(self, memory)
        self._legs_ahead = legs_ahead(plan)
        self._same_buckets = False
        self._legs_have_ended = False

    # Backward.

    def begin_backward(self, *, same_buckets: bool) -> None:
        """Reset all groups for the next iteration and announce its first scatter legs.

        Args:
            same_buckets: whether DDP's buckets are where they were in the last iteration, and will stay.
        """
        assert self.phase is Phase.IDLE
        self._same_buckets = same_buckets
        self.awaits_backward = False
        for group in self.groups:
            group.reset()
        self._legs_have_ended = False
        self._buckets.begin_backward()
        self._kept.forget_buckets()
        self.iteration += 1
        self.link.begin_iteration()
        self.phase = Phase.BACKWARD
        self._codes.begin()
        for index in range(self._legs_ahead):
            self._announce(index)

    def reduce(self, bucket: GradBucket, index: int, parameters: list[Tensor]) -> torch.futures.Future[Tensor]:
        """Take one DDP bucket and launch the scatter legs of groups that became complete.

        Args:
            bucket: the bucket.
            index: its number in this backward.
            parameters: its parameters, of which DDP makes a new list at every call.

        Returns:
            A completed future of the bucket's own gradients: DDP takes them for reduced, and backward does not wait.
        """
        buffer = bucket.buffer()
        staging = self._buckets.arrive(bucket, index, buffer, parameters)
        if staging.copies:
            self.link.stage(functools.partial(self._copy, staging.buffer, staging.copies))
        gradients = len(staging.slots)
        # We hold each slot's view, if gradients travel in place. The result of the hook counts as DDP's.
        self._kept.note_bucket(buffer, gradients, own=gradients if staging.slots[0].is_in_place else 0)
        for group, pieces in staging.arrivals:
            if group.arrive(pieces):
                self._launch(group)
        return staging.answer

    @torch.no_grad()
    def _copy(self, buffer: Tensor, copies: list[tuple[int, int, Tensor]]) -> None:
        self.order.join()
        for low, high, target in copies:
            scale_into(target, buffer[low:high], self._weights.own)
        self.order.mark()

    def _launch(self, group: Group) -> None:
        self._announce(group.spec.index + self._legs_ahead)
        group.launch(self.gathers.landing)
        self.gathers.launched(group)

    def _announce(self, index: int) -> None:
        # Not if DDP may leave out buckets: a leg that was announced must be started.
        if self._every_group_arrives and index < len(self.groups):
            self.groups[index].announce(same_buckets=self._same_buckets)

    def before_ddp_writes(self) -> None:
        """Let others have the device if DDP waits for other ranks next, to learn what is unused on all of them."""
        self.gradients.ddp_writes_next()
        if self._may_leave_out:
            self.compute_waits.others.release()

    def end_backward(self) -> None:
        """Launch the gather legs that are due, and make every ``.grad`` a PendingGrad unless a script keeps it."""
        self.order.join()
        if self._every_group_arrives:
            self._buckets.forget_absent()  # which frees the memory of those that DDP no longer has
        skipped = self._complete_partly_staged_groups()
        unused = [group for group in self.groups if not group.is_launched]
        for group in unused:
            group.skip()
        self.gathers.end_backward()
        self.link.end_scatter_legs()
        with self.lock:
            kept = self.gradients.make_pending(some_unused=bool(unused), skipped=skipped)
            self.phase = Phase.REDUCED
            for slot in kept:
                self.gradients.deliver_kept(slot)

    def _complete_partly_staged_groups(self) -> set[Slot]:
        """Launch groups for which DDP skipped a bucket, which no rank has used, without its gradients or with zeros.

        Returns:
            The parameters of these groups whose gradients have not arrived.
        """
        skipped: set[Slot] = set()
        arrived: set[Slot] | None = None
        for group in self.groups:
            if 0 < group.missing < len(group.spec.pieces):
                arrived = arrived or self._buckets.slots()
                for slot in group.slots:
                    if slot not in arrived:
                        skipped.add(slot)
                        if slot.is_in_place:
                            slot.has_not_arrived()
                        else:
                            slot.view.zero_()
                self._launch(group)
        if skipped:
            self._buckets.forget_absent()  # their slots have no place until they arrive again
        return skipped

    # Forward, and other code that needs a result.

    @property
    def unassigned(self) -> Sequence[Slot]:
        """Parameters that have not taken their gradients of this iteration."""
        return self.gradients.unassigned

    def expect_unreduced(self) -> None:
        """Know that the backward of the forward that has ended adds what no rank has shared."""
        self.gradients.expect_unreduced()

    def follow(self, use_rank: Sequence[int]) -> None:
        """Gather in the forward's new use order from now on."""
        self.gather_order.follow(use_rank)

    @property
    def has_shared_gradients(self) -> bool:
        """Whether gradients are the sum over all ranks; else some are each rank's own, as after ``no_sync()``."""
        return self.phase is Phase.REDUCED and self.gradients.are_reduced

    def complete(self, group: Group) -> None:
        """Wait until the group's buffer holds the reduced gradients."""
        self.gathers.bring_gradients(group)
        if self.waits.complete(group):
            self.order.publish()

    def before_exchange(self) -> None:
        """Call it before ranks exchange norms of reduced gradients."""
        if self.phase is Phase.REDUCED:
            self.gathers.before_exchange()

    def end_forward(
        self, call_before_backward: Callable[[Callable[[], None]], bool] | None, *, on_all_ranks: bool
    ) -> None:
        """Finish what needs the memory of DDP's buckets, into which the next backward writes before it calls the hook.

        Args:
            call_before_backward: calls a function when that backward begins, or returns False if it cannot; None if the
                next backward does not write into the buckets.
            on_all_ranks: whether all ranks have made this forward.
        """
        # Protects gradients that are still being copied.
        self.link.finish_staging()
        if self.layout.has_all_copied or self.phase is Phase.IDLE:
            return
        with self.lock:
            if self.phase is Phase.BACKWARD:
                if not is_in_backward():
                    self._retire()
                elif all(group.is_launched for group in self.groups):  # forward was called again by a checkpoint
                    self._end_legs()
                return
            self.updates.flush()
            self._end_legs(on_all_ranks=on_all_ranks)
            if call_before_backward is None:
                return  # the backward of an earlier forward may still be awaited
            self.awaits_backward = True
            self._buckets.note_versions()
            if not call_before_backward(self._before_backward):
                self.gradients.finish()

    def _before_backward(self) -> None:
        # Not if this backward comes second: DDP does not reduce it, and it adds to gradients that updates may need.
        if self.phase is Phase.REDUCED and self.awaits_backward:
            with self.lock:
                if any(group.is_spread for group in self.groups):
                    self.gradients.gather_spread()
                self.gradients.finish(leave_in_grad=True)

    def _is_overwritten(self, slot: Slot) -> bool:
        """Whether the backward that has begun has written into the bucket with this gradient."""
        return self.awaits_backward and is_in_backward() and self._buckets.is_overwritten(slot)

    def retire(self) -> None:
        """End the iteration: finish its updates, gradients and legs before its buffers are filled again."""
        if self.phase is not Phase.IDLE:
            with self.lock:
                self._retire()

    def _retire(self) -> None:
        self.updates.flush()
        if self.phase is Phase.REDUCED:
            self.gradients.finish()
        if self.phase is Phase.BACKWARD and not self.link.is_closed:
            self.link.finish_staging()
            for group in self.groups:
                group.end_announcement()
        self._end_legs()
        if self.phase is Phase.REDUCED:
            self._codes.end(self.groups, self.gradients.unassigned)
        self.phase = Phase.IDLE

    def _end_legs(self, *, on_all_ranks: bool = True) -> None:
        if self._legs_have_ended:
            return
        if not self.link.is_closed:
            self.gathers.end_legs(on_all_ranks=on_all_ranks)
        with self.compute_waits.of("end of iteration") as host_wait:
            for group in self.groups:
                if group.gather is not None:
                    # Protects peers that still receive from this buffer.
                    group.gather.wait(host_wait)
        # On CUDA each stream that comes here has to wait. And ranks with shards agree once more after backward.
        is_last = self.phase is Phase.REDUCED and self.link.streams is None
        self._legs_have_ended = is_last and all(group.gather is not None for group in self.groups)

    def release(self) -> dict[str, Tensor]:
        """Return the arenas by name, for the next plan's pipeline, and end this one."""
        assert self.phase is Phase.IDLE
        arenas = self.layout.release() | self.gathers.release()
        self.drop_references()
        return arenas

    def drop_references(self) -> None:
        """Drop parameters, buckets and fusion buffers. Ends the pipeline.

        Not at the next garbage collection: until then what it has of gradients would count as a script's references.
        """
        self._buckets.forget()
        self.gathers.release()
        self.layout.drop_references()
        self.gradients.drop_references()
        self.slot_of.clear()
