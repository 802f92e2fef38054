"""What codes need at the beginning and at the end of each step under one plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ddp_crossover.collectives.link import Link
from ddp_crossover.collectives.stream_order import StreamOrder
from ddp_crossover.fusion import FusionGroup, FusionPlan
from ddp_crossover.fusion_buffers.feedback import ArenaRange, Feedback
from ddp_crossover.parameters.slots import GroupInFlight, Slot


class CodedSteps:
    """The steps of a plan, some of whose gradients are coded.

    Args:
        feedback: memory for what codes leave out, already in use for this plan.
        plan: the plan.
        link: runs the legs.
        order: orders CUDA streams.
        arenas: the memory of the fusion buffers, by name.
        loss_scale: returns the factor of the loss of the backward that begins.
    """

    def __init__(
        self,
        feedback: Feedback,
        plan: FusionPlan,
        link: Link,
        order: StreamOrder,
        arenas: Mapping[str, Tensor],
        loss_scale: Callable[[], float | Tensor],
    ) -> None:
        self._feedback = feedback
        self._plan = plan
        self._link = link
        self._order = order
        self._arenas = arenas
        self._loss_scale = loss_scale
        self._padding = {
            arena: _padding(plan, arena).to(arenas[arena].device)
            for arena in {spec.arena for spec in plan.gradients if spec.is_coded}
        }

    def begin(self) -> None:
        self._clear_padding()
        with self._link.beside_legs():
            self._feedback.begin_step(self._loss_scale())

    def end(self, groups: Sequence[GroupInFlight], unassigned: Collection[Slot]) -> None:
        """Keep what the step has left out.

        Args:
            groups: all fusion groups, whose legs have ended.
            unassigned: parameters that have not taken the gradients of this step.
        """
        coded = [group for group in groups if self._plan.gradients[group.slots[0].index].is_coded]
        unused = [_range_of(group.spec) for group in coded if not group.is_launched]
        unused += [
            ArenaRange(slot.groups[0].spec.arena, low := self._plan.offsets[slot.index], low + slot.parameter.numel())
            for slot in unassigned
            if self._plan.gradients[slot.index].is_coded
        ]
        buffers = [group.buffer for group in coded if group.is_launched]
        finite = [one for b in buffers if b is not None and b.coding is not None for one in b.coding.finite]
        with self._link.beside_legs():
            self._feedback.end_step(unused, finite)

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """Remove what codes have brought into padding, such as NaN: no gradient overwrites it, and it is coded, too."""
        self._order.join()
        for arena, places in self._padding.items():
            self._arenas[arena].index_fill_(0, places, 0.0)
        self._order.mark()


def _padding(plan: FusionPlan, arena: str) -> Tensor:
    """The elements of an arena that belong to no gradient."""
    is_padding = torch.ones(plan.arena_numel[arena], dtype=torch.bool)
    for spec, low in zip(plan.gradients, plan.offsets, strict=True):
        if spec.arena == arena:
            is_padding[low : low + spec.numel] = False
    return is_padding.nonzero().view(-1)


def _range_of(group: FusionGroup) -> ArenaRange:
    return ArenaRange(group.arena, group.offset, group.offset + group.numel)
