"""Where the gradients of one plan lie: slots of parameters, fusion groups, and the memory of their buffers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from torch import Tensor

from ddp_crossover.comm.link import Link
from ddp_crossover.comm.sums import RankWeights
from ddp_crossover.comm.wire import Wire
from ddp_crossover.fusion import FusionGroup, FusionPlan
from ddp_crossover.pending.lazy_param import LazyParam
from ddp_crossover.pending.slots import Group, Slot
from ddp_crossover.pipeline.arenas import dtypes_of_arenas, lay_out, lay_out_in_arena, whole_of, zeros
from ddp_crossover.pipeline.codes import CodedSteps
from ddp_crossover.pipeline.staging import gradient_stride


class Layout:
    """The slots and the fusion groups of one plan.

    Args:
        plan: the plan.
        params: the parameters, in the plan's numbering.
        link: the link that will carry the gradients.
        lock: held while gradients are delivered.
        memory: arenas of the previous plan, reused where they are large enough.
        wire: what gradients are on the wire.
        weights: what each rank's gradients are multiplied by.
        codes: what travels as codes under this plan.
        owners: the ranks that reduce whole gradients, by index of the parameter; ranks share all others.
        every_group_arrives: False if DDP may leave out buckets: which came last time says nothing about this time.

    Attributes:
        arenas: memory for gradients that are copied, by name.
        slots: the slot of each parameter.
        groups: the fusion groups.
        changes: counts how often a fusion buffer was made anew, which may change who reduces which elements.
    """

    def __init__(
        self,
        plan: FusionPlan,
        params: Sequence[LazyParam],
        link: Link,
        lock: threading.RLock,
        *,
        memory: Mapping[str, Tensor],
        wire: Wire,
        weights: RankWeights,
        codes: CodedSteps,
        owners: Mapping[int, int],
        every_group_arrives: bool,
    ) -> None:
        self._plan = plan
        self._link = link
        self._lock = lock
        self._wire = wire if plan.is_coded else wire.plain
        self._weights = weights
        self._codes = codes
        self._owners = owners
        self._every_group_arrives = every_group_arrives
        parameters = [lazy.parameter for lazy in params]
        self.arenas = {
            arena: zeros(plan.arena_numel[arena], dtype, parameters[0].device, memory.get(arena))
            for arena, dtype in dtypes_of_arenas(plan.gradients, parameters, link, self._wire).items()
        }
        arena_of = {p.parameter: group.arena for group in plan.groups for p in group.pieces}
        self.slots = [self._slot(lazy, arena_of[lazy.index]) for lazy in params]
        self.groups = [self._group(spec) for spec in plan.groups]
        self.changes = 0

    def _slot(self, lazy: LazyParam, arena_name: str) -> Slot:
        parameter = lazy.parameter
        arena, stride = self.arenas.get(arena_name), gradient_stride(parameter)
        dtype = self._wire.travels_as(parameter.dtype, is_coded=self._plan.gradients[lazy.index].is_coded)
        slot = Slot(lazy, stride, dtype, self._lock, is_in_place=arena is None)
        if arena is not None:
            slot.view = arena.as_strided(parameter.shape, stride, self._plan.offsets[lazy.index])
        return slot

    def _group(self, spec: FusionGroup) -> Group:
        arena = self.arenas.get(spec.arena)
        group = Group(
            spec,
            [self.slots[p.parameter] for p in spec.pieces],
            self._link,
            self._lay_out if arena is None else None,
            changes_each_time=not self._every_group_arrives,
        )
        for slot in group.slots:
            slot.groups.append(group)
        if arena is not None:
            lay_out_in_arena(group, arena, self._plan.places_of(spec), self._owners, self._codes.travel(spec))
        return group

    def _lay_out(self, group: Group) -> None:
        lay_out(group, self._weights, self._owners)
        self.changes += 1

    @property
    def has_all_copied(self) -> bool:
        """Whether no gradient travels from DDP's buckets."""
        return len(self.arenas) == len(self._plan.arena_numel)

    def release(self) -> dict[str, Tensor]:
        """All memory of the arenas by name, for the next plan."""
        return {name: whole_of(arena) for name, arena in self.arenas.items()}

    def drop_references(self) -> None:
        """Drop parameters, DDP's buckets and fusion buffers, which would count as a script's references."""
        for slot in self.slots:
            slot.forget_bucket()
            slot.pending.current.leave()
            del slot.parameter, slot.pending
        for group in self.groups:
            group.forget_legs()
            group.forget_buffer()
        for held in (self.slots, self.groups, self.arenas):
            held.clear()
