"""DDP's buckets as they arrive, and how their gradients get into fusion buffers: by copies, or as parts of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.pending.slots import Group, Place, Slot
from ddp_crossover.pipeline.arenas import alias_of
from ddp_crossover.torch_internals.ddp import GradBucket


class Staging(NamedTuple):
    """How the gradients of one DDP bucket get into fusion buffers.

    Attributes:
        parameters: the bucket's parameters.
        slots: the slots of its parameters.
        arrivals: fusion groups with pieces in this bucket, each with the number of those pieces.
        buffer: the bucket's flat gradients.
        address: where they were when this was planned. A script may move their storage.
        copies: range of bucket elements [low, high), and the flat part of an arena that it is copied to; none if the
            bucket is itself a part of fusion buffers.
        answer: what the hook returns, a completed future of ``buffer``.
    """

    parameters: list[Tensor]
    slots: list[Slot]
    arrivals: list[tuple[Group, int]]
    buffer: Tensor
    address: int
    copies: list[tuple[int, int, Tensor]]
    answer: torch.futures.Future[Tensor]

    def fits(self, buffer: Tensor, parameters: list[Tensor]) -> bool:
        """Whether it is for these parameters in this memory, which is not freed while ``self.buffer`` refers to it."""
        has_same_parameters = list(map(id, self.parameters)) == list(map(id, parameters))
        return has_same_parameters and self.address == buffer.data_ptr()


class ArrivedBuckets:
    """The buckets of the latest backward.

    Args:
        slot_of: the slot of each parameter.
        arenas: the memory to which gradients are copied that do not travel in place.
    """

    def __init__(self, slot_of: Mapping[Tensor, Slot], arenas: Mapping[str, Tensor]) -> None:
        self._slot_of = slot_of
        self._arenas = arenas
        self._stagings: dict[int, Staging] = {}
        self._arrived: list[int] = []
        self._versions: dict[int, int] = {}

    def begin_backward(self) -> None:
        self._arrived.clear()

    def arrive(self, bucket: GradBucket, index: int, buffer: Tensor, parameters: list[Tensor]) -> Staging:
        """Note a bucket, by its number, with its flat gradients; returns how these get into fusion buffers."""
        staging = self._stagings.get(index)
        if staging is None or not staging.fits(buffer, parameters):
            slots = [self._slot_of[parameter] for parameter in parameters]
            staging = self._stagings[index] = plan_staging(
                index, buffer.detach(), slots, parameters, bucket.gradients(), self._arenas
            )
        self._arrived.append(index)
        return staging

    def slots(self) -> set[Slot]:
        """The parameters whose gradients have arrived."""
        return {slot for index in self._arrived for slot in self._stagings[index].slots}

    def forget_absent(self) -> None:
        """Drop those that have not arrived, which DDP no longer has or has left out."""
        for index in self._stagings.keys() - set(self._arrived):
            del self._stagings[index]

    def note_versions(self) -> None:
        """Note what is in the buckets now, before DDP writes to them again."""
        self._versions = {index: staging.buffer._version for index, staging in self._stagings.items()}

    def is_overwritten(self, slot: Slot) -> bool:
        """Whether DDP has written into the slot's bucket since, as versions tell: legs use an alias."""
        if slot.place is None:
            return False
        staging = self._stagings.get(slot.place.bucket)
        return staging is not None and staging.buffer._version != self._versions.get(slot.place.bucket)

    def forget(self) -> None:
        """Drop all references to DDP's buckets, which would count as a script's."""
        self._stagings.clear()
        self._arrived.clear()


def plan_staging(
    index: int,
    buffer: Tensor,
    slots: list[Slot],
    parameters: list[Tensor],
    gradients: list[Tensor],
    arenas: Mapping[str, Tensor],
) -> Staging:
    """Plan what to do with one bucket, and tell the slots where their gradients are, if they are not copied.

    Args:
        index: number of the bucket.
        buffer: its flat gradients, as a tensor object of which the caller keeps none.
        slots: the slots of its parameters, in the order of ``parameters``.
        parameters: its parameters.
        gradients: its gradients as views of ``buffer``, in the same order.
        arenas: the memory of the fusion buffers to which gradients are copied.
    """
    counts = Counter(group for slot in slots for group in slot.groups)
    arrivals = sorted(counts.items(), key=lambda item: item[0].spec.index)
    starts = [int(gradient.storage_offset()) - int(buffer.storage_offset()) for gradient in gradients]
    for slot, start in zip(slots, starts, strict=True):
        slot.note_address(buffer.data_ptr() + start * buffer.element_size())
    answer: torch.futures.Future[Tensor] = torch.futures.Future()
    answer.set_result(buffer)
    if not slots[0].is_in_place:  # a bucket's gradients have one dtype
        copies = _copies(slots, gradients, starts, arenas)
        return Staging(parameters, slots, arrivals, buffer, buffer.data_ptr(), copies, answer)
    memory = alias_of(buffer)
    for slot, gradient, start in zip(slots, gradients, starts, strict=True):
        view = buffer.as_strided(slot.parameter.shape, slot.stride, int(gradient.storage_offset()))
        slot.put(Place(index, memory, start, start + gradient.numel()), view, [group for group, _ in arrivals])
    return Staging(parameters, slots, arrivals, buffer, buffer.data_ptr(), [], answer)


def _copies(
    slots: list[Slot], gradients: list[Tensor], starts: list[int], arenas: Mapping[str, Tensor]
) -> list[tuple[int, int, Tensor]]:
    copies: list[tuple[int, int, Tensor]] = []
    low = high = target = -1
    arena: Tensor | None = None
    for slot, gradient, here in zip(slots, gradients, starts, strict=True):
        there = int(slot.view.storage_offset())
        own_arena = arenas[slot.groups[0].spec.arena]
        # Gradients that are adjacent both in the bucket and in the arena are copied together.
        if own_arena is arena and here == high and there == target + (high - low):
            high += gradient.numel()
        else:
            if arena is not None:
                copies.append((low, high, arena[target : target + high - low]))
            low, high, target, arena = here, here + gradient.numel(), there, own_arena
    if arena is not None:
        copies.append((low, high, arena[target : target + high - low]))
    return copies


def gradient_stride(parameter: Tensor) -> tuple[int, ...]:
    """Stride of ``parameter.grad``: the parameter's if it is dense, else contiguous (DDP's ``Bucket.bucket_views_in``).

    ``GradBucket.gradients()`` cannot be used for this: it shows every gradient as if it were contiguous.
    """
    numel = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != numel:
            return torch.empty(parameter.shape, device="meta").stride()
        numel *= size
    return parameter.stride()
