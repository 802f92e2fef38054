"""The pipeline of a sharded optimizer: shards are updated between the legs, and gather legs carry parameters.

    scatter leg -> reduced shard -> update of this rank's elements -> gather leg of parameters -> copy at the first use

Gather legs of gradients are sent only if code reads gradients. Before the first ``step()`` of an iteration any rank may
read one: all ranks hear of it in their ``step()``, gradients are gathered where parameters would arrive, and updated
parameters are exchanged at once in that step. A read after ``step()`` is a collective, which every rank must make; all
updates are applied first.

For the terms see [Note: DeAR's terms] in ``dear.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.leg import Leg, LegError, ScatterLeg
from ddp_crossover.dear import Phase, Pipeline, Updater
from ddp_crossover.fusion import FusionGroup, Schedule
from ddp_crossover.fusion_buffers.arenas import landing_of, whole_of, zeros
from ddp_crossover.fusion_buffers.in_place import lay_out
from ddp_crossover.optim.optimizer_snapshot import ToUpdate
from ddp_crossover.parameters.flat import flat_of, shaped
from ddp_crossover.parameters.slots import GroupInFlight, GroupState, ShardPiece, Slot
from ddp_crossover.sharding.exchange import exchange, in_chunks
from ddp_crossover.sharding.ownership import Ownership, Range, everything
from ddp_crossover.torch_internals.dispatch import outside_of_modes

EVERY_RANK = (
    "With shard_optimizer=True a read of gradients after step() gathers them from all ranks, so every rank must read "
    "them, at the same place: read them before step(), or let all ranks compute what rank 0 logs"
)
# States in which a rank has the reduced gradients of its own shard only.
_SPREAD = (GroupState.SCATTERING, GroupState.UPDATING, GroupState.UPDATED)


class ShardUpdater(Updater, Protocol):
    """Runs the updates of parameters that ranks share."""

    def is_trained(self, index: int) -> bool:
        """Whether a parameter has an optimizer."""

    def begins_backward(self) -> bool:
        """Called when a backward begins; returns whether updates may be made early in it."""

    def update_early(self, group: GroupInFlight, updates: list[ToUpdate]) -> None:
        """Update this rank's part of a group in backward, on trial."""


class ShardedPipeline(Pipeline):
    """Runs all fusion groups of one model under one plan; see :class:`Pipeline` for the other arguments.

    Args:
        updater: runs updates, some of them in backward.
        owners: the ranks that update whole parameters, by index of the parameter.

    Attributes:
        is_early: whether gather legs of this iteration may carry parameters that are updated on trial. The same on all
            ranks, which may be early with different groups.
        layouts: counts how often a group's fusion buffer was laid out, which may change who has which shards.
    """

    _updater: ShardUpdater

    def __init__(self, *args: Any, owners: Mapping[int, int], **kwargs: Any) -> None:
        self._owners = owners
        self._landing_arenas: dict[str, Tensor] = {}
        self._memory: Mapping[str, Tensor] = kwargs.get("memory", {})
        self._kept: dict[GroupInFlight, list[Tensor]] = {}
        self.is_early = False
        self._launched: list[GroupInFlight] = []
        self._latest_early: Leg | None = None
        self.layouts = 0
        self._decided_in = -1
        self._is_early_wrong = False  # known to all ranks in this iteration
        super().__init__(*args, **kwargs)
        self._memory = {}  # the landing arenas have what they use
        self._gathers_early = False
        self._followers = {}

    # Where gradients travel from, and where parameters arrive.

    def _group(self, spec: FusionGroup) -> GroupInFlight:
        group = super()._group(spec)
        if (arena := self._arenas.get(spec.arena)) is None:
            return group
        assert group.buffer is not None
        like = group.slots[0].parameter
        landing = arena
        if like.dtype is not arena.dtype:
            if spec.arena not in self._landing_arenas:
                memory = self._memory.get(landing_of(spec.arena))
                self._landing_arenas[spec.arena] = zeros(arena.numel(), like.dtype, like.device, memory)
            landing = self._landing_arenas[spec.arena]
        owners = [self._owners.get(slot.index) for slot in group.slots]
        if owners[0] is None:
            group.land_in(group.buffer if landing is arena else FusionBuffer((_part(landing, spec),)))
            return group
        starts = [place[1] for place in group.places if place is not None]
        bounds = [(start, start + piece.numel) for start, piece in zip(starts, spec.pieces, strict=True)]
        buffer, landed = (
            FusionBuffer(
                tuple(_part(memory, spec)[low:high] for low, high in bounds),
                owners=tuple(owner for owner in owners if owner is not None),
            )
            for memory in (arena, landing)
        )
        group.lay_out(buffer, [(part, 0) for part in range(len(bounds))])
        group.land_in(buffer if landing is arena else landed)
        return group

    def _lay_out(self, group: GroupInFlight) -> None:
        lay_out(group, self._weights, self._owners)
        group.land_in(group.buffer)
        self._kept.pop(group, None)
        self.layouts += 1

    def _scatter(self, group: GroupInFlight, buffer: FusionBuffer) -> ScatterLeg:
        return self.link.reduce_scatter(group.spec.index, buffer, group.landing)

    # Updates in backward, on trial.

    def begin_backward(self) -> None:
        super().begin_backward()
        self._launched.clear()
        self._latest_early = None
        self._is_early_wrong = False
        self.is_early = self._updater.begins_backward()

    def _launch(self, group: GroupInFlight) -> None:
        super()._launch(group)
        if self.is_early and all(self._updater.is_trained(slot.index) for slot in group.slots):
            self._launched.append(group)
            self._go_ahead()

    def _go_ahead(self) -> None:
        """Update a group that is reduced, if its gather leg would find the link idle, while backward goes on."""
        if self._latest_early is not None and not self._latest_early.is_posted:
            return
        ready = [group for group in self._launched if group.scatter is not None and group.scatter.is_done()]
        if ready:
            group = min(ready, key=lambda group: self._urgency[group.spec.index])
            self._launched.remove(group)
            outside_of_modes(functools.partial(self._update_early, group))
            self._latest_early = group.gather

    def _update_early(self, group: GroupInFlight) -> None:
        self._updater.update_early(group, self.begin_update(group, dict.fromkeys(group.slots)))
        self.send_update(group)

    def update_rest_early(self, slots: Iterable[Slot]) -> None:
        """In ``step()``, update on trial what was not updated in backward, while other ranks get there."""
        for group in self.in_order_of_updates(slots):
            self._update_early(group)

    def ownership(self) -> Ownership:
        """Which rank updates which elements, once all gradients have arrived."""
        ranges = [list(of_rank) for of_rank in self._ranges(self.groups)]
        for slot in self.slots:
            if not slot.parameter.numel():
                ranges[self._owners.get(slot.index, 0)].append(Range(slot.index, 0, 0))
        return tuple(map(tuple, ranges))

    def _ranges(self, groups: Iterable[GroupInFlight]) -> Ownership:
        groups, world_size = list(groups), self.link.world_size
        return tuple(
            tuple(_elements(piece) for group in groups for piece in group.shard_pieces(rank, world_size))
            for rank in range(world_size)
        )

    # Updates, which `ShardedUpdates` asks for in `step()`.

    def can_update_between_legs(self, slots: Iterable[Slot]) -> bool:
        """Whether gather legs can carry the updated values of these parameters, or do already, in this iteration."""
        return all(
            group.scatter is not None and (group.gather is None or (self.is_early and self._is_updated_early(group)))
            for slot in slots
            for group in slot.groups
        )

    def _is_updated_early(self, group: GroupInFlight) -> bool:
        return group.state is GroupState.UPDATING and not any(slot in self.updates for slot in group.slots)

    def in_order_of_updates(self, slots: Iterable[Slot]) -> list[GroupInFlight]:
        """The groups of these parameters, in the order in which to update them."""
        groups = dict.fromkeys(group for slot in slots for group in slot.groups if group.gather is None)
        if self.chooses_gathers:
            return sorted(groups, key=lambda group: group.spec.index)  # the order in which scatter legs end
        return [self.groups[index] for index in self.plan.use_order if self.groups[index] in groups]

    @property
    def chooses_gathers(self) -> bool:
        """Whether gather legs are sent when the link would be idle, in an order that may differ between ranks."""
        return self.link.orders_gathers and self.plan.schedule is Schedule.AUTO

    @torch.no_grad()
    def begin_update(self, group: GroupInFlight, gradients: Mapping[Slot, Tensor | None]) -> list[ToUpdate]:
        """Wait for the group's scatter leg, and put this rank's parameters where its gather leg sends from.

        Args:
            group: the group.
            gradients: the parameters to update; their gradients if these are in ``.grad``, else None.

        Returns:
            This rank's part of what is to be updated: its elements, flat, or the parameter if this rank owns it.
        """
        assert group.scatter is not None and group.landing is not None
        self._wait_for_scatter(group)
        self.order.join()
        own = group.landing.slices(self.link.rank, self.link.world_size)
        self._keep_gradients(group, group.scatter.shards())
        pieces = list(group.shard_pieces(self.link.rank, self.link.world_size))
        outs = [piece.of(own) for piece in pieces]
        values = [flat_of(piece.slot.lazy.memory.detach(), piece.slot.stride) for piece in pieces]
        if pieces:
            torch._foreach_copy_(outs, [v[p.start : p.stop] for v, p in zip(values, pieces, strict=True)])
        return [
            self._to_update(piece, out, gradients[piece.slot], group)
            for piece, out in zip(pieces, outs, strict=True)
            if piece.slot in gradients
        ]

    def _wait_for_scatter(self, group: GroupInFlight) -> None:
        assert group.scatter is not None
        with self.waiting(f"scatter {group.spec.index}") as host_wait:
            # Protects updates and readers from incomplete sums.
            group.scatter.wait(host_wait)

    def _keep_gradients(self, group: GroupInFlight, shards: Sequence[Tensor]) -> None:
        """Put the reduced gradients aside, where parameters will take their place."""
        if group.landing is not group.buffer:
            group.keep(list(shards))
            return
        if group not in self._kept:
            self._kept[group] = [torch.empty_like(shard) for shard in shards]
        group.keep(self._kept[group])
        torch._foreach_copy_(group.kept, list(shards))

    def _to_update(self, piece: ShardPiece, out: Tensor, in_memory: Tensor | None, group: GroupInFlight) -> ToUpdate:
        slot, has_owner = piece.slot, piece.slot.index in self._owners
        if in_memory is not None and has_owner:
            gradient = in_memory.detach()
        elif in_memory is not None:
            gradient = flat_of(in_memory.detach(), slot.stride)[piece.start : piece.stop]
        else:
            gradient = piece.of(group.kept).to(slot.parameter.dtype)
            for factor in slot.scales:  # not in place: `.grad` may be read later
                self.order.keep(factor)
                [gradient] = torch._foreach_mul([gradient], factor)
        if has_owner:
            out = shaped(out, slot.parameter.shape, slot.stride)
        if has_owner and in_memory is None:
            gradient = shaped(gradient, slot.parameter.shape, slot.stride)
        return shard_to_update(_elements(piece), out, gradient, slot.parameter.requires_grad)

    def send_update(self, group: GroupInFlight) -> None:
        """Start the gather leg, now that this rank's parameters are updated."""
        assert group.scatter is not None
        self.order.mark()
        urgency = self._urgency[group.spec.index] if self.chooses_gathers else None
        group.update_by(self.link.all_gather(group.scatter, urgency))

    def landed(self, slot: Slot) -> Tensor:
        """The updated parameter, once its groups are :attr:`GroupState.UPDATED`."""
        arena = self._landing_arenas.get(slot.groups[0].spec.arena)
        if arena is None:
            return slot.view
        return arena.as_strided(slot.parameter.shape, slot.stride, self.plan.offsets[slot.index])

    def _complete_for_update(self, group: GroupInFlight) -> None:
        if group.state is GroupState.UPDATING:
            self._wait_for_gather(group)
            group.end_update()

    def _is_ready_for_update(self, group: GroupInFlight) -> bool:
        return group.state is GroupState.UPDATED

    # Readers of gradients.

    def _is_lost(self, slot: Slot) -> bool:
        return any(group.state in _SPREAD for group in slot.groups_to_await)

    def complete(self, group: GroupInFlight) -> None:
        if not group.is_complete and self.link.is_closed:
            raise LegError("the model was given up, and its gradients are spread over the ranks (shard_optimizer=True)")
        if group.state in _SPREAD:
            self.decide(wants_gradients=True)
        if group.state in _SPREAD:  # some optimizer has made its step already, so other ranks have not been asked
            self._agree()
            self._gather_gradients()
        super().complete(group)

    def decide(self, *, wants_gradients: bool, is_early_right: bool = True) -> bool:
        """Learn whether any rank reads gradients before the first ``step()`` of this iteration; then gather them.

        A rank may read them alone, as a logger on rank 0 does, or because its garbage collector has not freed a view of
        a gradient yet. It then waits until the others get to where they ask, too: in :meth:`before_exchange`, any
        number of times, and in their ``step()``. Once some rank has read gradients, all have them, and nobody asks.

        Args:
            wants_gradients: whether this rank reads them.
            is_early_right: whether what this rank has updated on trial is what ``step()`` would have.

        Returns:
            Whether the latter is so on all ranks, and none reads gradients.
        """
        return self.ask(wants_gradients=wants_gradients, is_early_right=is_early_right)()

    def before_exchange(self) -> None:
        if self.phase is Phase.REDUCED and self._decided_in != self.iteration:
            # A rank that reads a gradient first waits for the others to hear of it, before it gets here. It may also
            # read one afterwards, so `step()` asks again.
            self._hear(self._tell(wants_gradients=False, is_early_right=False))
            self._is_early_wrong = True

    def ask(self, *, wants_gradients: bool, is_early_right: bool) -> Callable[[], bool]:
        """Begin :meth:`decide`; returns a function that waits for the other ranks and ends it."""
        if self._decided_in == self.iteration:
            return lambda: False
        self._decided_in = self.iteration
        is_early_right = is_early_right and not self._is_early_wrong
        return functools.partial(self._hear, self._tell(wants_gradients=wants_gradients, is_early_right=is_early_right))

    def _tell(self, *, wants_gradients: bool, is_early_right: bool) -> Callable[[], list[int]]:
        return self.link.exchange_numbers(4 * self.iteration + 2 * wants_gradients + (not is_early_right))

    def _hear(self, wait: Callable[[], list[int]]) -> bool:
        with self.waiting("gradients"), self.turns.released():
            answers = wait()
        if {answer // 4 for answer in answers} != {self.iteration}:
            raise RuntimeError(f"ranks are in different iterations. {EVERY_RANK}")
        if any(answer & 2 for answer in answers):
            self._decided_in = self.iteration
            self._gather_gradients()
        return not any(answer & 3 for answer in answers)

    def _agree(self) -> None:
        """Make sure that all ranks read gradients at this place."""
        with self.waiting("gradients"), self.turns.released():
            answers = self.link.exchange_numbers(-self.iteration)()
        if set(answers) != {-self.iteration}:
            raise RuntimeError(f"ranks read gradients at different places. {EVERY_RANK}")

    def _gather_gradients(self) -> None:
        """Gather all gradients: where parameters would arrive, if none are on the way there, else by an exchange."""
        if any(group.state in (GroupState.UPDATING, GroupState.UPDATED) for group in self.groups):
            self.flush()
        apart = [group for group in self.groups if group.state in _SPREAD and self._is_taken(group)]
        for group in apart:
            assert group.scatter is not None and group.buffer is not None
            if not group.kept:
                self._wait_for_scatter(group)
                self._keep_gradients(group, group.scatter.shards())
            if self.is_early:
                self._gather(group)
            if group.gather is not None:
                self._wait_for_gather(group)  # protects gradients from what still lands
            if group.landing is group.buffer:
                torch._foreach_copy_(group.buffer.slices(self.link.rank, self.link.world_size), group.kept)
        self._exchange_gradients(apart)
        self._gather_in_use_order()

    def _is_taken(self, group: GroupInFlight) -> bool:
        """Whether the gather leg cannot bring gradients, on this rank or another."""
        return self.is_early or group.gather is not None or group.landing is not group.buffer

    @torch.no_grad()
    def _exchange_gradients(self, groups: Sequence[GroupInFlight]) -> None:
        """Exchange the reduced gradients of these groups, which every rank has kept its shards of."""
        rank, world_size = self.link.rank, self.link.world_size
        by_arena = sorted(groups, key=lambda group: (group.spec.arena, group.spec.index))
        for alike in in_chunks(by_arena, lambda group: group.spec.arena, lambda g: self.plan.group_bytes(g.spec)):
            have = self._ranges(alike)
            mine = {_elements(p): p.of(group.kept) for group in alike for p in group.shard_pieces(rank, world_size)}
            assert alike[0].buffer is not None
            with self.waiting("gradients"), self.turns.released():
                parts = exchange(self.link, have, everything(have, range(world_size)), mine, alike[0].buffer.parts[0])
            for part, values in parts:
                self._gradient_memory(self.slots[part.parameter])[part.start : part.stop] = values
        self.order.publish()
        for group in groups:
            group.complete()
            group.keep([])

    def _gradient_memory(self, slot: Slot) -> Tensor:
        """The slot's gradient, flat, through an alias of DDP's bucket: a version tells what DDP has written."""
        if slot.place is not None:
            return slot.place.memory[slot.place.low : slot.place.high]
        return flat_of(slot.view, slot.stride)

    def belongs_to_update(self, slot: Slot) -> bool:
        return False  # the update was made with shards that are kept beside the buffer

    # The end of an iteration.

    def _gather_after_backward(self) -> None:
        pass  # `step()` decides what gather legs carry

    def _before_backward(self) -> None:
        if self.phase is Phase.REDUCED and self.awaits_backward:
            with self.lock:
                # Backward adds to a gradient that is still in `.grad`. To gather it then would overwrite buckets that
                # backward has written into. One that becomes zero is not gathered. No other groups: on another rank a
                # backward under no_sync() may have needed these gradients before, and has asked nobody about others.
                for slot in filter(self.gradients.is_pending, self.slots):
                    for group in slot.groups_to_await:
                        self.complete(group)
        super()._before_backward()

    def _gather(self, group: GroupInFlight, urgency: int | None = None) -> None:
        if not self._is_taken(group):
            super()._gather(group, urgency)
        elif group.scatter is not None and group.gather is None:
            if group.landing is group.buffer and not group.kept:
                self._wait_for_scatter(group)
                self._keep_gradients(group, group.scatter.shards())
            group.close_by(self.link.all_gather(group.scatter))  # peers have posted receives

    def _end_legs(self) -> None:
        is_spread = any(group.state in _SPREAD for group in self.groups)
        if is_spread and self.phase is Phase.REDUCED and not self.link.is_closed:
            self.decide(wants_gradients=False, is_early_right=False)  # if there was no step()
        for group in self.groups if not self.link.is_closed else ():
            self._gather(group)
        super()._end_legs()

    def _forget_buckets(self) -> None:
        super()._forget_buckets()
        self._kept.clear()
        self._launched.clear()
        self._latest_early = None
        for group in self.groups:
            group.keep([])
            if group.spec.arena not in self._arenas:
                group.land_in(None)

    def release(self) -> dict[str, Tensor]:
        landings = {landing_of(arena): whole_of(memory) for arena, memory in self._landing_arenas.items()}
        return super().release() | landings

    def drop_references(self) -> None:
        for group in self.groups:
            group.land_in(None)
        self._landing_arenas.clear()
        super().drop_references()


def shard_to_update(elements: Range, values: Tensor, gradient: Tensor, requires_grad: bool) -> ToUpdate:
    """A shard as an optimizer takes it: a parameter with a gradient."""
    memory = Parameter(values, requires_grad)
    memory.grad = gradient
    return ToUpdate(elements, memory)


def _elements(piece: ShardPiece) -> Range:
    return Range(piece.slot.index, piece.start, piece.stop)


def _part(arena: Tensor, spec: FusionGroup) -> Tensor:
    return arena.narrow(0, spec.offset, spec.numel)
