"""Gather legs of a sharded optimizer: shards are updated between the legs, and gather legs carry parameters.

    scatter leg -> reduced shard -> update of this rank's elements -> gather leg of parameters -> copy at the first use

Gather legs of gradients are sent only if code reads gradients. Before the first ``step()`` of an iteration any rank may
read one, as a logger on rank 0 does, or because its garbage collector has not freed a view of a gradient yet. It then
waits until the others get to where they ask, too: before norms are exchanged, any number of times, and in their
``step()``. Then all gather gradients where parameters would arrive, nobody asks any more, and updated parameters are
exchanged at once in that step. A read after ``step()`` is a collective, which every rank must make; all updates are
applied first.

A group whose gather leg carries parameters has its reduced shards in ``Group.put_aside``, which tells it from
one whose gradients are on the way. For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.addons.shards.between_ranks import in_chunks, number_of, redistribute, require_same_parameters
from ddp_crossover.addons.shards.errors_of_ranks import ErrorsOfRanks
from ddp_crossover.addons.shards.own_shards import shard_to_update
from ddp_crossover.addons.shards.ownership import Ownership, ParameterRange, everything
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.leg import LegError
from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.pending.flat import flat_of, shaped
from ddp_crossover.pending.slots import Group, GroupState, ShardPiece, Slot
from ddp_crossover.pipeline.arenas import landing_of, whole_of, zeros
from ddp_crossover.watching.optimizer_snapshot import ToUpdate

_ITERATION_BITS = 32  # of the numbers that ranks exchange; above them is what they have written

_EVERY_RANK = (
    "With shard_optimizer=True a read of gradients after step() gathers them from all ranks, so every rank must read "
    "them, at the same place: read them before step(), or let all ranks compute what rank 0 logs"
)


class _Landing(NamedTuple):
    """Where the gather leg of a group arrives.

    Attributes:
        of: the fusion buffer that this is for.
        buffer: where updated parameters arrive; it may be the fusion buffer itself.
        kept: memory for the reduced gradients in whose place they arrive, if it is; made when it is first needed.
    """

    of: FusionBuffer
    buffer: FusionBuffer
    kept: list[Tensor]


class ParameterGathers:
    """Gather legs that carry updated parameters; see ``gathers.Gathers`` for what a pipeline asks.

    Args:
        pipeline: the pipeline whose legs these are.
        owners: the ranks that update whole parameters, by index of the parameter.
        memory: arenas of the previous plan, reused where they are large enough.
        errors: raises errors of one rank on all.
    """

    def __init__(
        self, pipeline: Pipeline, owners: Mapping[int, int], memory: Mapping[str, Tensor], errors: ErrorsOfRanks
    ) -> None:
        self._errors = errors
        self._pipeline = pipeline
        self._link = pipeline.link
        self._gather_order = pipeline.gather_order
        self._owners = owners
        self._arenas = _landing_arenas(pipeline, memory)
        self._landings: dict[Group, _Landing] = {}
        self._decided_in = -1  # the iteration in which ranks have agreed for the last time

    # Where parameters arrive.

    def landing(self, group: Group) -> FusionBuffer:
        """Where the group's parameters arrive, in their own dtype."""
        return self._landing(group).buffer

    def _landing(self, group: Group) -> _Landing:
        buffer, known = group.buffer, self._landings.get(group)
        assert buffer is not None
        if known is None or known.of is not buffer:
            known = self._landings[group] = _Landing(buffer, self._like(buffer, group.spec.arena), [])
        return known

    def _like(self, buffer: FusionBuffer, arena: str) -> FusionBuffer:
        if (memory := self._arenas.get(arena)) is None:
            return buffer
        lows = [part.storage_offset() for part in buffer.parts]
        parts = tuple(memory[low : low + part.numel()] for low, part in zip(lows, buffer.parts, strict=True))
        return FusionBuffer(parts, owners=buffer.owners)

    def landed(self, slot: Slot) -> Tensor:
        """The updated parameter, once it has arrived."""
        memory = self._arenas.get(slot.groups[0].spec.arena)
        if memory is None:
            return slot.view
        return memory.as_strided(slot.parameter.shape, slot.stride, self._pipeline.plan.offsets[slot.index])

    # Updates, which `ShardedUpdates` asks for in `step()`.

    def ownership(self) -> Ownership:
        """Which rank updates which elements, once all gradients have arrived."""
        ranges = [list(of_rank) for of_rank in self._ranges(self._pipeline.groups)]
        for slot in self._pipeline.slots:
            if not slot.parameter.numel():
                ranges[self._owners.get(slot.index, 0)].append(ParameterRange(slot.index, 0, 0))
        return tuple(map(tuple, ranges))

    def _ranges(self, groups: Iterable[Group]) -> Ownership:
        groups, world_size = list(groups), self._link.world_size
        return tuple(
            tuple(_elements(piece) for group in groups for piece in group.shard_pieces(rank, world_size))
            for rank in range(world_size)
        )

    def can_update_between_legs(self, slots: Iterable[Slot]) -> bool:
        """Whether gather legs can carry the updated values of these parameters in this iteration."""
        return all(group.scatter is not None and group.gather is None for slot in slots for group in slot.groups)

    def in_order_of_updates(self, slots: Iterable[Slot]) -> list[Group]:
        groups = dict.fromkeys(group for slot in slots for group in slot.groups if group.gather is None)
        if self._gather_order.leaves_when_idle:
            return sorted(groups, key=lambda group: group.spec.index)  # the order in which scatter legs end
        return [group for group in self._gather_order.in_use_order() if group in groups]

    @torch.no_grad()
    def begin_update(self, group: Group, gradients: Mapping[Slot, Tensor | None]) -> list[ToUpdate]:
        """Wait for the group's scatter leg, and put this rank's parameters where its gather leg sends from.

        Args:
            group: the group.
            gradients: the parameters to update; their gradients if these are in ``.grad``, else None.

        Returns:
            This rank's part of what is to be updated: its elements, flat, or the parameter if this rank owns it.
        """
        self._keep_gradients(group)
        own = self.landing(group).slices(self._link.rank, self._link.world_size)
        pieces = list(group.shard_pieces(self._link.rank, self._link.world_size))
        outs = [piece.of(own) for piece in pieces]
        values = [flat_of(piece.slot.lazy.memory.detach(), piece.slot.stride) for piece in pieces]
        if pieces:
            torch._foreach_copy_(outs, [v[p.start : p.stop] for v, p in zip(values, pieces, strict=True)])
        return [
            self._to_update(piece, out, gradients[piece.slot], group)
            for piece, out in zip(pieces, outs, strict=True)
            if piece.slot in gradients
        ]

    def _keep_gradients(self, group: Group) -> None:
        """Wait for the reduced gradients, and put them aside, where parameters will take their place."""
        assert group.scatter is not None
        with self._pipeline.compute_waits.of(f"scatter {group.spec.index}") as host_wait:
            # Protects updates and readers from incomplete sums.
            group.scatter.wait(host_wait)
        self._pipeline.order.join()
        shards = group.scatter.shards()
        if self._lands_apart(group):
            group.keep(shards)
            return
        memory = self._landing(group).kept
        if not memory:
            memory.extend(map(torch.empty_like, shards))
        group.keep(memory)
        torch._foreach_copy_(group.put_aside, shards)

    def _lands_apart(self, group: Group) -> bool:
        return group.spec.arena in self._arenas

    def _to_update(self, piece: ShardPiece, out: Tensor, in_memory: Tensor | None, group: Group) -> ToUpdate:
        slot, has_owner = piece.slot, piece.slot.index in self._owners
        if in_memory is not None:
            gradient = in_memory.detach()
            if not has_owner:
                gradient = flat_of(gradient, slot.stride)[piece.start : piece.stop]
        else:
            gradient = piece.of(group.put_aside).to(slot.parameter.dtype)
            for factor in slot.scales:  # not in place: `.grad` may be read later
                self._pipeline.order.keep(factor)
                [gradient] = torch._foreach_mul([gradient], factor)
            if has_owner:
                gradient = shaped(gradient, slot.parameter.shape, slot.stride)
        if has_owner:
            out = shaped(out, slot.parameter.shape, slot.stride)
        return shard_to_update(_elements(piece), out, gradient, slot.parameter.requires_grad)

    def send_update(self, group: Group) -> None:
        """Start the gather leg, now that this rank's parameters are updated."""
        assert group.state is GroupState.SCATTERING
        self._pipeline.order.mark()
        group.start_gather(self._gather_order.urgency(group) if self._gather_order.leaves_when_idle else None)

    # Readers of gradients.

    def bring_gradients(self, group: Group) -> None:
        """Have all gradients gathered, if this group's are spread; a collective, on all ranks."""
        if self._link.is_closed and (group.is_spread or not group.is_complete):
            raise LegError("the model was given up, and its gradients are spread over the ranks (shard_optimizer=True)")
        if group.is_spread:
            self.decide(wants_gradients=True)
        if group.is_spread:  # some optimizer has made its step already, so other ranks have not been asked
            self._require_same_place()
            self._gather_gradients()

    def decide(self, *, wants_gradients: bool, written: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Agree with the other ranks on what gather legs of this iteration carry.

        Args:
            wants_gradients: whether this rank reads gradients before ``step()``; then all ranks gather them.
            written: parameters that the script has written since their last update, by name.

        Raises:
            RuntimeError: on all ranks, if they would carry parameters that ranks have changed differently.
        """
        if not self.is_decided:
            self._decided_in = self._pipeline.iteration
            self._ask(wants_gradients=wants_gradients, written=written)

    def before_exchange(self) -> None:
        """Meet a rank that reads gradients first, and so waits for the others before it gets to the exchange.

        It may also read some afterwards, so ``step()`` asks again.
        """
        if not self.is_decided:
            self._ask(wants_gradients=False)

    @property
    def is_decided(self) -> bool:
        """Whether ranks have agreed in this iteration."""
        return self._decided_in == self._pipeline.iteration

    def _ask(self, *, wants_gradients: bool, written: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Gather all gradients if any rank reads some; else no rank may have changed parameters by itself."""
        mine = 2 * self._pipeline.iteration + wants_gradients
        with self._waiting_for_ranks():
            numbers = self._errors.exchange_numbers(number_of(written) << _ITERATION_BITS | mine)
        answers = {number % 2**_ITERATION_BITS for number in numbers}
        if {answer // 2 for answer in answers} != {self._pipeline.iteration}:
            raise RuntimeError(f"ranks are in different iterations. {_EVERY_RANK}")
        if any(answer & 1 for answer in answers):
            self._decided_in = self._pipeline.iteration
            self._gather_gradients()
        elif len(set(numbers)) > 1:
            every = {slot.name: slot.lazy.memory for slot in self._pipeline.slots}
            require_same_parameters(self._link, self._pipeline.slots[0].lazy.memory.device, written, every)

    def _require_same_place(self) -> None:
        """Raise RuntimeError unless all ranks read gradients at this place."""
        with self._waiting_for_ranks():
            numbers = self._errors.exchange_numbers(-self._pipeline.iteration)
        if set(numbers) != {-self._pipeline.iteration}:
            raise RuntimeError(f"ranks read gradients at different places. {_EVERY_RANK}")

    @contextlib.contextmanager
    def _waiting_for_ranks(self) -> Iterator[None]:
        with self._pipeline.compute_waits.of("gradients"), self._pipeline.compute_waits.others.released():
            yield

    def _gather_gradients(self) -> None:
        """Gather all gradients: where parameters would arrive, if none are on the way there, else by an exchange."""
        groups = self._pipeline.groups
        if any(map(_carries_update, groups)):
            self._pipeline.updates.flush()
        apart = [group for group in groups if group.is_spread and self._is_taken(group)]
        for group in apart:
            assert group.buffer is not None
            if not group.put_aside:
                self._keep_gradients(group)
            if group.gather is not None:
                self._pipeline.waits.arrival(group)  # protects gradients from what still lands
            if not self._lands_apart(group):
                torch._foreach_copy_(group.buffer.slices(self._link.rank, self._link.world_size), group.put_aside)
        self._exchange_gradients(apart)
        self._start_all()

    def _is_taken(self, group: Group) -> bool:
        """Whether the gather leg cannot bring gradients, on this rank or another."""
        return group.gather is not None or self._lands_apart(group)

    @torch.no_grad()
    def _exchange_gradients(self, groups: Sequence[Group]) -> None:
        """Exchange the reduced gradients of these groups, which every rank has kept its shards of."""
        rank, world_size, plan = self._link.rank, self._link.world_size, self._pipeline.plan
        by_arena = sorted(groups, key=lambda group: (group.spec.arena, group.spec.index))
        for alike in in_chunks(by_arena, lambda group: group.spec.arena, lambda g: plan.group_bytes(g.spec)):
            have = self._ranges(alike)
            mine = {
                _elements(p): p.of(group.put_aside) for group in alike for p in group.shard_pieces(rank, world_size)
            }
            assert alike[0].buffer is not None
            with self._waiting_for_ranks():
                parts = redistribute(
                    self._link, have, everything(have, range(world_size)), mine, alike[0].buffer.parts[0]
                )
            for part, values in parts:
                _gradient_memory(self._pipeline.slots[part.parameter])[part.start : part.stop] = values
        self._pipeline.order.publish()
        for group in groups:
            group.restore()

    # How far an iteration has come.

    def launched(self, group: Group) -> None:
        """Nothing to do: ``step()`` decides what gather legs carry."""

    def end_backward(self) -> None:
        """Nothing to do."""

    def end_legs(self, *, on_all_ranks: bool) -> None:
        """Start all gather legs, of gradients where these can travel, once ranks have agreed on that."""
        if self._pipeline.phase is Phase.REDUCED and any(group.is_spread for group in self._pipeline.groups):
            if not (on_all_ranks or self.is_decided):
                return
            self.decide(wants_gradients=False)  # if there was no step()
        self._start_all()

    def _start_all(self) -> None:
        for group in self._gather_order.in_use_order():
            self._start(group)

    def _start(self, group: Group) -> None:
        if group.scatter is None or group.gather is not None:
            return
        if not self._is_taken(group):
            group.start_gather()
            return
        if not self._lands_apart(group) and not group.put_aside:
            self._keep_gradients(group)
        group.close()

    def release(self) -> dict[str, Tensor]:
        """Return the arenas in which parameters arrive, and drop what refers to DDP's buckets."""
        arenas = {landing_of(arena): whole_of(memory) for arena, memory in self._arenas.items()}
        self._arenas.clear()
        self._landings.clear()
        return arenas


def _landing_arenas(pipeline: Pipeline, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Memory for parameters whose gradients travel through an arena in another dtype, by that arena's name."""
    arenas: dict[str, Tensor] = {}
    for group in pipeline.groups:
        arena, first = group.spec.arena, group.slots[0]
        if first.is_cast and arena not in arenas:
            numel, like = pipeline.plan.arena_numel[arena], first.parameter
            arenas[arena] = zeros(numel, like.dtype, like.device, memory.get(landing_of(arena)))
    return arenas


def _carries_update(group: Group) -> bool:
    return bool(group.put_aside) and group.state in (GroupState.GATHERING, GroupState.COMPLETE)


def _gradient_memory(slot: Slot) -> Tensor:
    """The slot's gradient, flat, through an alias of DDP's bucket: a version tells what DDP has written."""
    if slot.place is not None:
        return slot.place.memory[slot.place.low : slot.place.high]
    return flat_of(slot.view, slot.stride)


def _elements(piece: ShardPiece) -> ParameterRange:
    return ParameterRange(piece.slot.index, piece.start, piece.stop)
