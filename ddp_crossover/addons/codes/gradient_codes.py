"""What of a model's gradients travels as codes, from step to step and from plan to plan, and in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_crossover.addons.codes.coding import Coding
from ddp_crossover.addons.codes.feedback import ArenaRange, Feedback
from ddp_crossover.addons.codes.rounds import CodedTravel
from ddp_crossover.addons.codes.wire import CodedWire
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.stream_order import StreamOrder
from ddp_crossover.fusion import FusionGroup, FusionPlan, GradientSpec
from ddp_crossover.log import say
from ddp_crossover.pending.slots import Group, Slot
from ddp_crossover.pipeline.codes import NO_CODES, CodedSteps
from ddp_crossover.torch_internals.loss_scale import LossScale


class GradientCodes:
    """The codes of a model's gradients; see :class:`ddp_crossover.pipeline.codes.Codes`.

    Args:
        wire: what gradients are on the wire.
        specs: all gradients.
        link: runs the legs.
        device: where the parameters are.
    """

    def __init__(self, wire: CodedWire, specs: Sequence[GradientSpec], link: Link, device: torch.device) -> None:
        self._feedback = Feedback(wire, specs, link, device)
        self._link = link
        self._loss_scale = LossScale(is_watched=True)

    def steps(self, plan: FusionPlan, order: StreamOrder) -> CodedSteps:
        with self._link.beside_legs():
            self._feedback.use(plan)
        return StepsOfPlan(self._feedback, plan, self._link, order, self._loss_scale) if plan.is_coded else NO_CODES

    def state_dict(self, end_iteration: Callable[[], None]) -> dict[str, Any]:
        end_iteration()
        with self._link.beside_legs():
            return self._feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], end_iteration: Callable[[], None]) -> None:
        end_iteration()
        if "steps" not in state:
            return
        rank, world_size = self._link.rank, self._link.world_size
        if state["world_size"] != world_size:
            if rank == 0:
                say(
                    f"what codes of gradients have left out was saved by {state['world_size']} ranks, and there are "
                    f"{world_size}: it is dropped, and later codes will not make up for it"
                )
            return
        if state["rank"] != rank:
            raise ValueError(
                f"rank {rank} was given the state of rank {state['rank']}: save one file for each rank, and load the "
                "rank's own"
            )
        with self._link.beside_legs():
            self._feedback.load_state_dict(state)


class StepsOfPlan:
    """The steps of a plan, some of whose gradients are coded; see :class:`ddp_crossover.pipeline.codes.CodedSteps`.

    Args:
        feedback: memory for what codes leave out, already in use for this plan.
        plan: the plan.
        link: runs the legs.
        order: orders CUDA streams.
        loss_scale: the factor of the loss of the backward that begins.
    """

    def __init__(
        self, feedback: Feedback, plan: FusionPlan, link: Link, order: StreamOrder, loss_scale: LossScale
    ) -> None:
        self._feedback = feedback
        self._plan = plan
        self._link = link
        self._order = order
        self._loss_scale = loss_scale
        self._arenas: Mapping[str, Tensor] = {}
        self._padding: dict[str, Tensor] = {}

    def travel(self, group: FusionGroup) -> CodedTravel | None:
        return self._feedback.travel(group) if self._plan.gradients[group.pieces[0].parameter].is_coded else None

    def use(self, arenas: Mapping[str, Tensor]) -> None:
        self._arenas = arenas
        self._padding = {
            arena: _padding(self._plan, arena).to(arenas[arena].device)
            for arena in {spec.arena for spec in self._plan.gradients if spec.is_coded}
        }

    def begin(self) -> None:
        self._clear_padding()
        with self._link.beside_legs():
            self._feedback.begin_step(self._loss_scale.now())

    def end(self, groups: Sequence[Group], unassigned: Collection[Slot]) -> None:
        """Keep what the step has left out.

        Args:
            groups: all fusion groups, whose legs have ended.
            unassigned: parameters that have not taken the gradients of this step.
        """
        coded = [group for group in groups if self._plan.gradients[group.slots[0].index].is_coded]
        specs = [group.spec for group in coded if not group.is_launched]
        unused = [ArenaRange(spec.arena, spec.offset, spec.offset + spec.numel) for spec in specs]
        unused += [
            ArenaRange(slot.groups[0].spec.arena, low := self._plan.offsets[slot.index], low + slot.parameter.numel())
            for slot in unassigned
            if self._plan.gradients[slot.index].is_coded
        ]
        finite = self._feedback.finite_sums(group.spec for group in coded if group.is_launched)
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
    is_padding = torch.ones(plan.arena_numel[arena], dtype=torch.bool, device="cpu")
    for spec, low in zip(plan.gradients, plan.offsets, strict=True):
        if spec.arena == arena:
            is_padding[low : low + spec.numel] = False
    return is_padding.nonzero().view(-1)


def buffers_over(
    memory: Mapping[str, Tensor], specs: Sequence[GradientSpec], link: Link, wire: CodedWire
) -> list[FusionBuffer]:
    """For each arena whose gradients are coded, a buffer over all of it, which a link may connect with."""
    assert wire.scatter is not None
    arenas = [memory[name] for name in dict.fromkeys(spec.arena for spec in specs if spec.is_coded)]
    quantum = link.world_size * wire.align_numel
    return [
        FusionBuffer(
            (arena[: len(arena) // quantum * quantum].zero_(),), travel=CodedTravel(Coding(wire.scatter, wire.gather))
        )
        for arena in arenas
    ]
